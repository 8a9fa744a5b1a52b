"""What Azure ML tells the nodes of a PyTorch job -> `Rendezvous`.

With `process_count_per_instance: 1` it starts one process a node and sets MASTER_ADDR, MASTER_PORT,
NODE_RANK, WORLD_SIZE and RANK, and AZUREML_NODE_COUNT on all clusters. With more processes RANK
would be a process's; NODE_RANK is read, and one that is too large is an error."""

from collections.abc import Mapping

from rekindle.launch.rendezvous import Rendezvous, number


def rendezvous(environment: Mapping[str, str], gpus: int) -> Rendezvous:
    """The node's place; a job of one node may lack all of it."""
    nodes = number(environment, "AZUREML_NODE_COUNT", number(environment, "WORLD_SIZE", 1))
    if nodes == 1:
        return Rendezvous(ranks_per_node=max(1, gpus))
    name = "NODE_RANK" if environment.get("NODE_RANK") else "RANK"
    rank, address = number(environment, name), environment.get("MASTER_ADDR", "")
    port = number(environment, "MASTER_PORT")
    return Rendezvous(nodes, rank, max(1, gpus), address, port).checked(name)
