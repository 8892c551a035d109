// The options that only elastic runs have (--outer-transport store).
#pragma once

struct ElasticOptions {
    int min_workers = 0;        // that must have sent before any continues; 0: more than half, or one of two
    int least_to_begin = 0;     // workers that must be there when a run begins, if more than min_workers
    double grace = 10;          // seconds that a sync waits at its due step for workers that are alive
    long max_lag = -1;          // steps that a worker may be behind before it jumps ahead; -1: tau
    long retain = 4;            // syncs of each fragment whose payloads are kept for workers that return
    bool join_moments = false;  // a worker that joins takes another worker's moments, too
    int restarts = 0;           // of a worker that has failed, by its launcher
};
