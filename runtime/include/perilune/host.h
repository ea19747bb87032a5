/* SPDX-License-Identifier: Apache-2.0
 *
 * perilune/host.h: for programs that embed the runtime: where its memory, its log lines and its plugins come from and
 * go to, its beginning and its end. It takes function pointers, so it is not part of the Lua declarations and
 * perilune.h does not include it.
 *
 * What the library does to a process, unasked: it starts worker threads (peri_threads() - 1 of them, at the first
 * operation that is large enough; they are called "perilune" and take no signals) and reads its environment (PERI_*).
 * It installs no signal handler, leaves locale, rounding and the masks of the caller's threads as they are (no result
 * depends on these, or on denormals being flushed there), prints log lines of PERI_LOG_WARN and worse unless
 * peri_host_log_set says otherwise, and neither exits nor aborts. The shared library stays loaded after dlclose, and so
 * does, from the first device on, a shared object that holds libperilune.a (link that with
 * -Wl,--exclude-libs,libperilune.a, so that two of them do not take each other's functions).
 *
 * A world of the transport mpi, where the library starts MPI: MPI_Init changes variables of the environment, so no
 * other thread may use it (getenv, setenv) until peri_comm_open has returned; they are then as before, unless it failed
 * by its deadline. Open MPI's signal handlers are not installed (unless OMPI_MCA_opal_signal asks for them). What stays
 * until the process ends: a handler of SIGPIPE that does nothing, if there was none; Open MPI's threads, files in its
 * session folder and, without mpirun, its daemon; a call of MPI_Finalize at exit; and the other ranks' permission to
 * copy from this process's memory (PR_SET_PTRACER). Where MPI_Init cannot begin (no memory, no threads, settings
 * that contradict each other), Open MPI prints why and ends the process: the one exit that the library cannot prevent.
 *
 * Functions that the program gives (of memory, log lines, threads, tensors) may not call the library, which may hold
 * locks meanwhile. One rule holds for all public functions there, so that nothing waits: those that return a status
 * refuse (PERI_EINVAL, with a text that says so), a release does nothing (the reference stays the program's, which
 * releases it later), log lines are dropped, and all others only read what is there: names, versions, counts, texts of
 * errors. What failed there is forgotten when the function has returned: the thread's error record is the one before.
 * They have to return: an exception that leaves one, and a thread that ends in one, end the process with a message. A
 * longjmp out of one leaves locks behind: its thread is refused everything from then on, and others may wait for ever.
 * A child that one of them forks may run another program or end; it is refused everything else.
 *
 * A thread may not be cancelled (pthread_cancel) while it is in a call, which may hold locks: disable cancellation
 * there (pthread_setcancelstate). Files that the library writes are never descriptors 0..2, also where those are
 * closed.
 *
 * fork: a child may go on with tables, tensors and everything else in memory; it starts workers of its own. What needs
 * threads or connections of its parent (tables in files, groups of several ranks) refuses in a child on its first call
 * (PERI_EUNSUPPORTED). Fork while no other thread is in a call on an object that the child will use. fork itself waits
 * until other threads have left the libraries that multiply matrices (a block of 256 rows at most, or the loading of
 * such a library), so that the child finds their locks free.
 *
 * Threads: peri_host_init, peri_host_log_set and peri_host_tensor may be called by any thread at any time; all others
 * while no other thread is in a call of the library.
 */
#ifndef PERILUNE_HOST_H
#define PERILUNE_HOST_H

#include <perilune/base.h>
#include <perilune/lua.h>
#include <perilune/tensor.h>

/**
 * Make all heap memory of the runtime come from the host's functions, which behave like malloc, realloc and free and
 * may be called from any thread, while it holds locks: they may not call the library, throw or jump. Where they return
 * NULL, the call fails with PERI_ENOMEM. The memory of tensors is not heap memory: see peri_host_storage_set. Local;
 * before any other call of the library: PERI_EINVAL once something is allocated, or when one of the functions is
 * missing.
 */
PERI_API peri_status peri_host_allocator_set(void *(*alloc)(size_t size), void *(*resize)(void *p, size_t size),
                                             void (*release)(void *p));

/**
 * Make the memory of all tensors and tables of device cpu come from the host's functions, in blocks of 4 KiB and more
 * that the library cuts and keeps: @take gives @bytes at a multiple of @alignment (4,096, or 2 MiB for blocks as large
 * as that) or NULL, @give gets them back. Any thread calls them, while it holds a lock: they may not call the library,
 * throw or jump. Both NULL: the system's memory. Local; before the first tensor, or after peri_host_shutdown:
 * PERI_EINVAL otherwise. peri_device_trim gives back what is kept and free.
 */
PERI_API peri_status peri_host_storage_set(void *(*take)(size_t bytes, size_t alignment),
                                           void (*give)(void *p, size_t bytes));

/**
 * Give log lines to @log instead of stderr, with @ctx, their PERI_LOG_*, and a text without a line feed that is
 * borrowed; NULL: print them again. It may be called from any thread, by several at once and while the library holds
 * locks, so it may not call the library; nor may it throw or jump. A call that has begun may end after
 * peri_host_log_set has returned. Which lines: peri_log_level_set. Never fails.
 */
PERI_API peri_status peri_host_log_set(void (*log)(void *ctx, int32_t level, const char *text), void *ctx);

/**
 * Compute on the program's own threads. @run(@ctx, parts, part, arg) calls part(arg, i) for each i of [0, parts), on
 * whatever threads, beside each other or one after the other, and returns when all calls have returned; what it leaves
 * out is computed by the thread that called it. It is called by one thread at a time, may not call the library, throw
 * or jump, and parts need 64 KiB of stack. @threads: peri_threads() from now on, the most parts of an operation,
 * 1..256; results do not depend on it. @run NULL: the library's own workers again, as many as at first. A child of fork
 * and whoever comes after peri_host_shutdown begin with these. PERI_EINVAL: an operation is being computed.
 */
PERI_API peri_status peri_host_pool_set(
    int32_t threads, void (*run)(void *ctx, int32_t parts, void (*part)(void *arg, int32_t i), void *arg), void *ctx);

/**
 * Bind the library's own workers to @processors [@n] (copied), one after the other and round and round; 0 of them: to
 * none, as at first. The caller of an operation computes too, and stays where it is. A binding that the system refuses
 * is no error: no result depends on it.
 * PERI_EINVAL: a number that is no processor's, or an operation is being computed.
 */
PERI_API peri_status peri_host_affinity_set(const int32_t *processors, int32_t n);

/** Look for plugins in the folders @path (copied; each begins with /, between them ':'; NULL: none) before those of
 *  PERI_PLUGIN_PATH. PERI_EINVAL for other folders. Local. Plugins that are loaded stay. */
PERI_API peri_status peri_host_plugin_path_set(const char *path);

/**
 * A contiguous tensor over memory of the program's own (heap, mmap, huge pages, shared between processes): nothing is
 * copied, whoever writes to @data writes to the tensor. @release (or NULL) gets @ctx and @data when the last tensor
 * that lies in it, views and what the tape keeps included, is gone: once, on the thread that gave it up, which may be
 * one of the library's; it may not call the library, throw or jump. @device: cpu; PERI_EUNSUPPORTED for others. @data:
 * aligned as elements are. On failure @release is not called. @out new. With it, peri_tbe_config.weights puts tables
 * into such memory.
 */
PERI_API peri_status peri_host_tensor(peri_device *device, int32_t dtype, int32_t ndim, const int64_t *shape,
                                      void *data, void (*release)(void *ctx, void *data), void *ctx, peri_tensor **out);

/** Say that a part of the program uses the library from now on. Counted; any thread; programs that never shut it down
 *  need not call it. */
PERI_API peri_status peri_host_init(void);
/**
 * Say that this part needs it no more. The last of them ends the worker threads, closes all devices and gives back all
 * memory: afterwards peri_mem_live and peri_mem_objects are 0, pointers to devices are void, and the library may be
 * used again from the beginning. What a world of the transport mpi knows of its ranks (some 700 bytes each) stays until
 * the process ends if the world failed, or was not closed before its release: MPI may still look at it. PERI_EINVAL,
 * and nothing happens: objects are not released yet, another thread computes, or peri_host_init was not called. No
 * other call may run meanwhile.
 */
PERI_API peri_status peri_host_shutdown(void);

#endif
