"""What a site is worth: a model of the device that plays the very schedules that would run.

    profile.py    what is known of a machine, as numbers: JSON, checked field by field
    load.py       which profile to use: load("h200"), load("file.json"), load(None)
    shape.py      what has to be computed and moved at one site      SiteShape
    matmul.py     time of one matmul
    program.py    a rank's schedule as items with costs to look up
    play.py       items on two queues, with events, flags and contention -> times
    predict.py    (shape, strategy, profile) -> Prediction
    choose.py     (shape, profile) -> Choice
    of_site.py    a graph's site -> SiteShape
    again.py      what gathering a tensor again adds to backward
    amounts.py    bytes and operations of a site, and what a bulk collective takes along

All of it but of_site.py, again.py and amounts.py is plain Python without torch: a plan can be made where there is no GPU and no
torch.fx. A prediction depends on shape, strategy and profile alone.
"""

from .choice import StrategyChoice, choose
from .predict import Prediction, candidates, predict
from .profile import Profile
from .profile_lookup import load
from .site_shape import SiteShape

__all__ = ["Prediction", "Profile", "SiteShape", "StrategyChoice", "candidates", "choose", "load", "predict"]
