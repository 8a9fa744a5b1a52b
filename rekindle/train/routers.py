"""The losses by which mixtures of experts are kept in balance, which the engine does not
compute.

transformers adds one to its own loss where the configuration says `output_router_logits`,
by a coefficient that it has anyway. Light to import: doctor asks it."""

from typing import Any

from torch import nn

from rekindle.errors import UnsupportedError
from rekindle.train import modules

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_alpha", "router_z_loss_coef")


def check_losses(network: nn.Module) -> str:
    """What of the architecture's own loss the engine leaves out, in words; "" for
    nothing.

    Raises UnsupportedError where the configuration asks for a loss of routers."""
    config: Any = getattr(network, "config", None)
    names = [name for name in COEFFICIENTS if getattr(config, name, None)]
    if not names:
        return ""
    shown = ", ".join(f"{name} {getattr(config, name):g}" for name in names)
    kind = modules.model_type(network)
    if getattr(config, "output_router_logits", False):
        message = f"{kind}'s configuration asks for the auxiliary loss of its experts ({shown}), "
        message += "which the engine does not compute"
        fix = "set output_router_logits: false, or use train.engine: trainer"
        raise UnsupportedError(message, where="model.source", fix=fix)
    return (
        f"the auxiliary loss of the experts ({shown}) is not part of the loss, as in transformers"
    )
