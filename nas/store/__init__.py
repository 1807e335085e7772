"""What survives: studies, trials, results, jobs, devices and files, in one database and one folder.

One module per table or pair of tables; each is functions over a `Store`. Several calls inside `with store.write():`
are one transaction. What they give are the frozen rows of `nas.store.rows`.
"""
