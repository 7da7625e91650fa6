"""The cost model: predictions from the very schedules that would run.

    profile.py          measured properties of a machine: JSON, checked field by field
    profile_lookup.py   which profile to use: load("h200"), load("file.json"), load(None)
    policy.py           the policy of overlap="auto": which sites are predicted, profile, threshold
    site_shape.py       the sizes of one site: SiteShape
    wire.py             bytes on the wire
    matmul_time.py      time of one matmul
    program.py          a rank's schedule as items with costs to look up
    simulate.py         items on two queues, with events, flags and contention -> times
    predict.py          (shape, strategy, profile) -> Prediction
    choice.py           (shape, profile) -> StrategyChoice
    fused_curves.py     measured times of collectives of few tokens
    fused_time.py       time of a collective of few tokens, as one kernel and plain
    fused_choice.py     (shape, profile) -> StrategyChoice of such a collective
    site_sizes.py       a graph's site -> SiteShape
    regather.py         time that gathering a tensor again adds to backward
    traffic.py          bytes and operations of a site

All but policy.py, site_sizes.py, regather.py and traffic.py is plain Python without torch: a plan can be made without a GPU and
without torch.fx. A prediction depends on shape, strategy and profile alone.
"""

from .choice import StrategyChoice, choose
from .predict import Prediction, candidates, predict
from .profile import Profile
from .profile_lookup import load
from .site_shape import SiteShape

__all__ = ["Prediction", "Profile", "SiteShape", "StrategyChoice", "candidates", "choose", "load", "predict"]
