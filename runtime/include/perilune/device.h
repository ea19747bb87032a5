/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/device.h: devices, streams, events.
 *
 * A device runs kernels and copies on *streams*: queues whose work runs in order, some time after it was queued. Work
 * of different streams is ordered by *events* only. "cpu" runs everything at once; "opaque" (a test device) runs it as
 * late as it can, in any order that no event forbids, on memory that the host cannot touch. Every thread has a current
 * stream per device, on which all tensor operations queue; it starts as the device's default stream.
 *
 * Threads: any number of threads may use a device (peri_device) and queue on a stream (peri_stream) at once. An event
 * (peri_event) is recorded by one thread at a time; any thread may wait for it afterwards.
 */
#ifndef PERILUNE_DEVICE_H
#define PERILUNE_DEVICE_H

#include <perilune/base.h>

typedef struct peri_device peri_device;
typedef struct peri_stream peri_stream;
typedef struct peri_event peri_event;

/** Open (first time) and return device @name: "cpu", "opaque", "cuda:0", ...; "cuda" is the GPU of this rank's number
 *  on its machine. Local. @out borrowed, lives as long as the process.
 *  PERI_ENOTFOUND for an unknown name, PERI_EUNSUPPORTED with the reason when the backend cannot run here. */
PERI_API peri_status peri_device_get(const char *name, peri_device **out);
/** Full name, "cuda:0". Borrowed. */
PERI_API const char *peri_device_name(const peri_device *device);
/** True when the host may dereference this device's memory. */
PERI_API bool peri_device_host_access(const peri_device *device);
/** Whether backend @name could run here; if not, @reason (of @size bytes) says why. Local, never fails. */
PERI_API bool peri_device_probe(const char *name, char *reason, int64_t size);
/** The instruction set of device cpu's kernels: "ref", "avx2", "avx512"; PERI_CPU_ISA asks for one. Static text. Local,
 *  never fails. */
PERI_API const char *peri_cpu_isa(void);
/** For whom the calling thread works from now on, any number; returns the one before (0 at first). Where ids are
 *  checked behind the call that looks them up, their fault is told to the thread that looked them up, and only while it
 *  works for the same. Simulated ranks share a thread. Local, never fails. */
PERI_API uint64_t peri_late_owner(uint64_t owner);
/** Block the calling thread until everything queued on every stream of the device has run. Local. */
PERI_API peri_status peri_device_synchronize(peri_device *device);
/** @available: bytes of the device's memory that are still to be had; -1: it does not know. Local. */
PERI_API peri_status peri_device_memory(peri_device *device, int64_t *available);
/** Give memory back to the driver that @device keeps for later and does not use: for other libraries of the process,
 *  which allocate by themselves. NCCL's communicators do so by themselves. Local. */
PERI_API peri_status peri_device_trim(peri_device *device);
/** Make the test device "opaque" choose its orders from @seed (default 1, or PERI_OPAQUE_SEED). No effect on other
 *  devices. */
PERI_API peri_status peri_device_seed(peri_device *device, uint64_t seed);

/** A new stream of @device. @out new. */
PERI_API peri_status peri_stream_new(peri_device *device, peri_stream **out);
/** Add a reference. */
PERI_API void peri_stream_retain(peri_stream *stream);
/** Give up a reference; queued work still runs; NULL is fine. */
PERI_API void peri_stream_release(peri_stream *stream);
/** The device that it is of. Borrowed. */
PERI_API peri_device *peri_stream_device(const peri_stream *stream);
/** The calling thread's current stream of @device. Borrowed. */
PERI_API peri_stream *peri_stream_current(peri_device *device);
/** Make @stream (retained; NULL: the default stream of @device) the calling thread's current stream of @device. */
PERI_API peri_status peri_stream_current_set(peri_device *device, peri_stream *stream);
/** Later work on @stream waits for @event. Does not block the host. An event never recorded is already done. */
PERI_API peri_status peri_stream_wait(peri_stream *stream, peri_event *event);
/** Block the calling thread until everything queued on @stream has run. */
PERI_API peri_status peri_stream_synchronize(peri_stream *stream);

/** A new event of @device. @out new. */
PERI_API peri_status peri_event_new(peri_device *device, peri_event **out);
/** Give up a reference; NULL is fine. */
PERI_API void peri_event_release(peri_event *event);
/** The device that it is of. Borrowed. */
PERI_API peri_device *peri_event_device(const peri_event *event);
/** Mark the present end of @stream. */
PERI_API peri_status peri_event_record(peri_event *event, peri_stream *stream);
/** PERI_OK when everything before the mark has run, PERI_PENDING when not yet. Does not block. */
PERI_API peri_status peri_event_query(peri_event *event);
/** Block the calling thread until everything before the mark has run. */
PERI_API peri_status peri_event_synchronize(peri_event *event);

#endif
