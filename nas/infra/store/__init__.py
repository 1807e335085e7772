"""The database: studies, trials, results, jobs, devices; and the folder of artifacts.

One module for each table or group of tables that are used together, with functions over a `Store` that return the
frozen records of `nas.infra.store.rows`. Several calls inside `with store.write():` are one transaction.
"""
