"""Spark itself knows the settings in conf/, and takes their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_conf import CONF, FILES, settings

pytestmark = pytest.mark.spark

# Spark's settings are in its registry once the object that defines them has been loaded.
DEFINITIONS = (
    "org.apache.spark.internal.config.package$",
    "org.apache.spark.deploy.yarn.config.package$",
    "org.apache.spark.deploy.k8s.Config$",
)
VOLUMES = "spark.kubernetes.executor.volumes."
# Names that Spark puts together itself; each kind has a test below.
COMPOSED = (".resource.gpu.", "spark.executorEnv.", ".volumes.")
# The accelerator's own, of a jar that is not here.
FOREIGN = "spark.rapids."


@pytest.fixture(scope="module")
def jvm(spark: Any) -> Any:
    for name in DEFINITIONS:
        spark._jvm.java.lang.Class.forName(name)
    return spark._jvm


def spark_conf(jvm: Any, found: dict[str, str]) -> Any:
    conf = jvm.org.apache.spark.SparkConf(False)
    for key, value in found.items():
        conf.set(key, value)
    return conf


def find_entry(jvm: Any, key: str) -> Any:
    """Return Spark's definition of a setting; None if it has none of that name."""
    return jvm.org.apache.spark.internal.config.ConfigEntry.findEntry(key)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_spark_has_every_setting_and_takes_its_value(jvm: Any, file: Path) -> None:
    defined = 0
    for key, value in settings(file).items():
        if key.startswith(FOREIGN) or any(part in key for part in COMPOSED):
            continue
        entry = find_entry(jvm, key)
        assert entry is not None, key
        # Raises what Spark raises; the value itself stays in the JVM, as Python has not all kinds.
        jvm.scala.Option.apply(value).map(entry.valueConverter())
        defined += 1
    # The workers' file is about resources only.
    assert defined > 1 or file.name == "standalone-gpu-worker.conf"


def test_the_registry_tells_names_apart(jvm: Any) -> None:
    assert find_entry(jvm, "spark.executor.memoryOverhead") is not None
    assert find_entry(jvm, "spark.executor.memoryOverhed") is None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_spark_finds_the_gpus_that_are_asked_for(jvm: Any, file: Path) -> None:
    found = settings(file)
    asked = {key for key in found if ".resource." in key}
    conf = spark_conf(jvm, found)
    known = set()
    for component in ("spark.executor", "spark.task", "spark.worker"):
        gpu = jvm.org.apache.spark.resource.ResourceID(component, "gpu")
        known |= {gpu.amountConf(), gpu.discoveryScriptConf(), gpu.vendorConf()}
        if component != "spark.task" and gpu.amountConf() in asked:
            request = jvm.org.apache.spark.resource.ResourceUtils.parseResourceRequest(conf, gpu)
            assert request.amount() == int(found[gpu.amountConf()])
            script = found.get(gpu.discoveryScriptConf())
            assert request.discoveryScript().isPresent() == (script is not None)
            if script is not None:
                assert request.discoveryScript().get() == script
    assert asked
    assert asked <= known


def test_the_memory_that_pods_share_is_mounted(jvm: Any) -> None:
    conf = spark_conf(jvm, settings(CONF / "kubernetes-gpu.conf"))
    utils = jvm.org.apache.spark.deploy.k8s.KubernetesVolumeUtils
    volumes = utils.parseVolumesWithPrefix(conf, VOLUMES)
    found = [volumes.apply(number) for number in range(volumes.size())]
    assert {(volume.volumeName(), volume.mountPath()) for volume in found} == {
        ("shm", "/dev/shm"),
        ("runs", "/runs"),
    }
    shm = next(volume for volume in found if volume.volumeName() == "shm")
    assert shm.volumeConf().toString() == "KubernetesEmptyDirVolumeConf(Some(Memory),Some(4Gi))"


def test_the_environment_of_executors_is_given(jvm: Any) -> None:
    given = {}
    for file in FILES:
        conf = spark_conf(jvm, settings(file))
        environment = conf.getExecutorEnv()
        pairs = [environment.apply(number) for number in range(environment.size())]
        given.update({pair._1(): pair._2() for pair in pairs})
    assert given == {"HSR_GPU_ADDRESSES": "uuid", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
