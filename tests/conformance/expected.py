"""The tests of optax that fail with offloaded optimizers and pass with plain ones, and why, by column.

A key is a regular expression; it names every test in whose label it is found. Each of them must fail.
"""

SCHEDULE_FREE = "schedule_free_eval_params(state, params) computes with the state's z, outside update"

NAMED = {
    "offload": {
        r"ContribTest::test_optimizers\(opt_name='schedule_free": SCHEDULE_FREE,
        r"ContribTest::test_optimizers\(.*wrapper_name='schedule_free'": SCHEDULE_FREE,
        r"MonitoringTest::test_monitor$": "optax.monitor wraps an optimizer that the suite has wrapped: two offloads",
    },
    # Inside, schedule_free is plain and so is its z.
    "offload-inside": {},
}
