"""Pipelines of the suite's own: a step on two nodes that holds them for some seconds, and one for a schedule."""

from kfp import dsl

import rekindle


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def hold(seconds: int) -> int:
    import time

    from rekindle.launch.rendezvous import Rendezvous

    place = Rendezvous.current()
    print(f"node {place.node_rank} of {place.nodes} holds", flush=True)
    time.sleep(seconds)
    print(f"node {place.node_rank} of {place.nodes} lets go", flush=True)
    return seconds


@dsl.pipeline(name="suite-hold")
def holding(seconds: int):
    held = hold(seconds=seconds)
    held.set_caching_options(False)
    rekindle.distribute(held, nodes=2)


@dsl.pipeline(name="suite-hold-with-a-deadline")
def holding_with_a_deadline(seconds: int):
    held = hold(seconds=seconds)
    held.set_caching_options(False)
    rekindle.distribute(held, nodes=2, max_run_hours=1 / 60)


@dsl.pipeline(name="suite-hold-gpus")
def holding_gpus(seconds: int):
    held = hold(seconds=seconds)
    held.set_caching_options(False)
    rekindle.distribute(held, nodes=2, gpus_per_node=1)


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def tell() -> str:
    return "the time has come"


@dsl.pipeline(name="suite-scheduled")
def scheduled():
    tell()
