"""A heartbeat with figures that matter to nobody, unless they are given."""

from shared.messages import ReplicaHealth, StepModel


def health(replica: str = "r1", *, boot: str = "b1", **changes) -> ReplicaHealth:
    figures = {
        "model": "m",
        "model_version": "m@1",
        "accepting": True,
        "blocks_total": 100,
        "blocks_free": 100,
        "running": 0,
        "running_max": 4,
        "waiting": 0,
        "waiting_tokens": {},
        "step": StepModel(base_s=0.01, per_token_s=0.001),
        "step_age_s": 0.0,
        "step_predicted_s": 0.0,
        "tokens_per_s": 0.0,
        **changes,
    }
    return ReplicaHealth(replica=replica, boot_id=boot, **figures)
