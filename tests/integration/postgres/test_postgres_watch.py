from test_farm_watch import *  # noqa: F403
