/* Knobs and counters of the emulated HIP runtime and of the CUDA forwarder.
 *
 * They are 64-bit integers in one block of memory, knobs first, in the order below. With HIPEMU_BLOCK set to a
 * path the block is that file, mapped shared, so that a test can turn the knobs of a running process and read its
 * counters. control.py reads the names from this file. Every knob is 0 at the start.
 */
#ifndef HIPEMU_KNOBS_H
#define HIPEMU_KNOBS_H

#include <stdatomic.h>

#define KNOBS(X)                                                                                      \
  X(hold)             /* not 0: no copy that is enqueued lands until it is 0 again */                 \
  X(latency_us)       /* a copy lands this long after it was enqueued */                              \
  X(fail_copy)        /* n: the n-th copy from now cannot be enqueued */                              \
  X(fail_code)        /* the error of fail_copy; 0 stands for hipErrorInvalidValue */                 \
  X(fail_event)       /* an error: the next event to be queried reports it (an asynchronous fault) */ \
  X(fail_ipc_open)    /* an error: memory handles cannot be opened */                                 \
  X(fail_ipc_export)  /* an error: memory handles cannot be made */                                   \
  X(no_peer_access)   /* not 0: no device reaches another one */

#define COUNTERS(X)                                                                                   \
  X(copies) X(ipc_opened) X(ipc_closed) X(streams_made) X(streams_gone) X(events_made) X(events_gone) \
  X(event_queries) X(device_waits)

enum {
#define X(name) KNOB_##name,
  KNOBS(X)
#undef X
#define X(name) COUNT_##name,
  COUNTERS(X)
#undef X
  BLOCK_SLOTS
};

extern _Atomic long *hipemu_block;

/* Map the block; called once before anything else reads it. */
void hipemu_open_block(void);

#define KNOB(name) atomic_load(&hipemu_block[KNOB_##name])
#define TURN(name, value) atomic_store(&hipemu_block[KNOB_##name], (value))
#define COUNT(name) atomic_fetch_add(&hipemu_block[COUNT_##name], 1)

#endif
