from test_service_watch import *  # noqa: F403
