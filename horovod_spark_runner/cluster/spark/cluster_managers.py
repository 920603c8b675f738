"""Facts of YARN and Kubernetes about an application's executors, for messages."""

from __future__ import annotations

from collections import Counter
from typing import Any

# Milliseconds to look for a resource manager that does not answer.
_CONNECT_MILLISECONDS = "5000"


def describe_queue(context: Any) -> str:
    """Return the queue's limit, what the application has of it, and the nodes, for a message.

    Args:
        context: a ``SparkContext`` on YARN.

    Returns:
        The text, after a semicolon; empty if the resource manager does not answer.
    """
    from py4j.protocol import Py4JError

    jvm = context._jvm
    records = jvm.org.apache.hadoop.yarn.api.records
    conf = jvm.org.apache.hadoop.yarn.conf.YarnConfiguration(context._jsc.hadoopConfiguration())
    conf.set("yarn.resourcemanager.connect.max-wait.ms", _CONNECT_MILLISECONDS)
    client = jvm.org.apache.hadoop.yarn.client.api.YarnClient.createYarnClient()
    try:
        client.init(conf)
        client.start()
        application = records.ApplicationId.fromString(context.applicationId)
        report = client.getApplicationReport(application)
        queue = client.getQueueInfo(report.getQueue())
        states = context._gateway.new_array(records.NodeState, 1)
        states[0] = records.NodeState.RUNNING
        nodes = ", ".join(
            f"{node.getNodeId().getHost()} {node.getUsed()} of {node.getCapability()}"
            for node in client.getNodeReports(states)
        )
        has = report.getApplicationResourceUsageReport().getUsedResources()
        return (
            f"; YARN's queue {report.getQueue()} may use {queue.getMaximumCapacity():.0%} of its "
            f"parent, and has given this application {has.toString()}, with its application "
            f"master; in use on its nodes: {nodes or 'none is running'}"
        )
    except Py4JError:
        return ""
    finally:
        client.stop()


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
        namespace = scala.conf().get("spark.kubernetes.namespace", "default")
        pods = field.get(backend).pods().inNamespace(namespace)
        own = pods.withLabel("spark-app-selector", context.applicationId)
        found = own.withLabel("spark-role", "executor").list().getItems()
        states = Counter(_describe(pod.getStatus()) for pod in found)
    except Py4JError:
        return ""
    listed = "; ".join(f"{count} {state}" for state, count in states.items())
    return f"; executor pods: {listed or 'none'}"


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
