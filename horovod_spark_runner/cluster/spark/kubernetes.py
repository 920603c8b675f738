"""State of an application's executor pods on Kubernetes."""

from __future__ import annotations

from collections import Counter
from typing import Any


def describe_pods(context: Any) -> str:
    """Return how many executor pods are in which phase, and what they wait for, for a message.

    Args:
        context: a ``SparkContext`` on Kubernetes.

    Returns:
        The text, after a semicolon; empty if the API server does not answer.
    """
    from py4j.protocol import Py4JError

    scala = context._jsc.sc()
    try:
        # Spark's own client has the credentials and the address that it is configured with.
        backend = scala.schedulerBackend()
        field = backend.getClass().getDeclaredField("kubernetesClient")
        field.setAccessible(True)
        pods = field.get(backend).pods().inNamespace(scala.conf().get(_NAMESPACE, "default"))
        own = pods.withLabel("spark-app-selector", context.applicationId)
        found = own.withLabel("spark-role", "executor").list().getItems()
        states = Counter(_describe(pod.getStatus()) for pod in found)
    except Py4JError:
        return ""
    listed = "; ".join(f"{count} {state}" for state, count in states.items())
    return f"; executor pods: {listed or 'none'}"


_NAMESPACE = "spark.kubernetes.namespace"


def _describe(status: Any) -> str:
    reasons = [
        f"{condition.getReason()}: {condition.getMessage()}"
        for condition in status.getConditions()
        if condition.getType() == "PodScheduled" and condition.getStatus() == "False"
    ]
    for container in status.getContainerStatuses():
        waiting = container.getState().getWaiting()
        if waiting is not None:
            reasons.append(f"{waiting.getReason()}: {waiting.getMessage() or ''}")
    return f"{status.getPhase()} ({', '.join(reasons)})" if reasons else str(status.getPhase())
