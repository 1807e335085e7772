from test_store_devices import *  # noqa: F403
