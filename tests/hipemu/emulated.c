/* A HIP runtime without a GPU, for tests of code that moves bytes with HIP.
 *
 * The node has HIPEMU_DEVICES (2) devices, of which HIP_VISIBLE_DEVICES picks those that this process sees. Device
 * memory is a memfd, so a process can map another one's through /proc/<pid>/fd, which is what an IPC handle names;
 * a page without access lies behind every allocation. Copies on streams are done by one thread, in stream order; a
 * copy that nothing delays is done at once. Interprocess events lie in memfds too.
 *
 * It is stricter than the real thing where a caller's mistake would be memory corruption there: it aborts when a
 * mapping is closed under a copy that has not landed.
 *
 * Not here: kernels, graphs, virtual memory management, textures. The build makes those calls fail (801).
 */
#define _GNU_SOURCE
#include "hip_abi.h"
#include "knobs.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_DEVICES = 64, PAGE = 4096, POLL_US = 100 };

static _Thread_local hipError_t last_error;
static _Thread_local int current_device;

static hipError_t result(hipError_t error) {
  if (error) last_error = error;
  return error;
}
API hipError_t hipGetLastError(void) {
  hipError_t error = last_error;
  last_error = SUCCESS;
  return error;
}
API hipError_t hipPeekAtLastError(void) { return last_error; }

/* ------------------------------------------------------------------------------------------------- devices */
static int device_count;
static int node_number[MAX_DEVICES]; /* of each visible ordinal */
static pid_t initialised_pid;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static unsigned char peer_enabled[MAX_DEVICES][MAX_DEVICES];

static void initialise(void) {
  hipemu_open_block();
  const char *text = getenv("HIPEMU_DEVICES");
  int total = text && *text ? atoi(text) : 2;
  const char *visible = getenv("HIP_VISIBLE_DEVICES");
  if (total > MAX_DEVICES) total = MAX_DEVICES;
  if (!visible) {
    for (int i = 0; i < total; i++) node_number[device_count++] = i;
  } else {
    while (*visible && device_count < MAX_DEVICES) {
      char *end;
      long number = strtol(visible, &end, 10);
      if (end == visible || number < 0 || number >= total) break;
      node_number[device_count++] = (int)number;
      visible = *end == ',' ? end + 1 : end;
    }
  }
  initialised_pid = getpid();
}

static hipError_t ready(void) {
  pthread_once(&once, initialise);
  if (initialised_pid != getpid()) return NOT_INITIALIZED; /* a real runtime does not survive fork() either */
  return device_count ? SUCCESS : NO_DEVICE;
}
#define READY()                        \
  do {                                 \
    hipError_t error_ = ready();       \
    if (error_) return result(error_); \
  } while (0)

static int is_device(int device) { return device >= 0 && device < device_count; }

API hipError_t hipInit(unsigned flags) {
  (void)flags;
  READY();
  return SUCCESS;
}
API hipError_t hipRuntimeGetVersion(int *version) {
  *version = 70051831;
  return SUCCESS;
}
API hipError_t hipDriverGetVersion(int *version) { return hipRuntimeGetVersion(version); }
API hipError_t hipGetDeviceCount(int *count) {
  *count = 0;
  READY();
  *count = device_count;
  return SUCCESS;
}
API hipError_t hipGetDevice(int *device) {
  READY();
  *device = current_device;
  return SUCCESS;
}
API hipError_t hipSetDevice(int device) {
  READY();
  if (!is_device(device)) return result(INVALID_DEVICE);
  current_device = device;
  return SUCCESS;
}
static void bus_id(char *text, int length, int device) {
  snprintf(text, (size_t)length, "0000:%02X:00.0", (0xc1 + node_number[device]) & 0xff);
}
API hipError_t hipDeviceGetPCIBusId(char *text, int length, int device) {
  READY();
  if (!is_device(device) || length < 13) return result(INVALID_DEVICE);
  bus_id(text, length, device);
  return SUCCESS;
}
API hipError_t hipDeviceGetByPCIBusId(int *device, const char *text) {
  READY();
  for (int i = 0; i < device_count; i++) {
    char own[16];
    bus_id(own, sizeof own, i);
    if (!strcasecmp(own, text)) {
      *device = i;
      return SUCCESS;
    }
  }
  return result(INVALID_DEVICE);
}
API hipError_t hipDeviceCanAccessPeer(int *answer, int device, int peer) {
  READY();
  if (!is_device(device) || !is_device(peer)) return result(INVALID_DEVICE);
  *answer = device != peer && !KNOB(no_peer_access);
  return SUCCESS;
}
API hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  READY();
  if (flags || !is_device(peer) || peer == current_device) return result(INVALID_DEVICE);
  if (KNOB(no_peer_access)) return result(NOT_SUPPORTED);
  if (peer_enabled[current_device][peer]) return result(PEER_ACCESS_ALREADY_ENABLED);
  peer_enabled[current_device][peer] = 1;
  return SUCCESS;
}
API hipError_t hipDeviceGetAttribute(int *value, int attribute, int device) {
  READY();
  (void)attribute;
  if (!is_device(device)) return result(INVALID_DEVICE);
  *value = 0;
  return SUCCESS;
}
API hipError_t hipGetDevicePropertiesR0600(char *properties, int device) {
  READY();
  if (!is_device(device)) return result(INVALID_DEVICE);
  memset(properties, 0, PROPERTIES_BYTES);
  strcpy(properties, "emulated GPU");
  *(size_t *)(void *)(properties + PROPERTIES_TOTAL_MEMORY) = (size_t)64 << 30;
  strcpy(properties + PROPERTIES_ARCH_NAME, "gfx942");
  return SUCCESS;
}
API hipError_t hipMemGetInfo(size_t *free_bytes, size_t *total) {
  READY();
  *total = (size_t)64 << 30;
  *free_bytes = (size_t)60 << 30;
  return SUCCESS;
}

/* -------------------------------------------------------------------------------------------------- memory */
enum kind { OWN, IMPORTED, HOST_ALLOCATED, HOST_REGISTERED };

struct allocation {
  struct allocation *next;
  char *base;
  size_t size, mapped;
  enum kind kind;
  int fd, device;
  int users;   /* of an imported one */
  pid_t owner; /* of an imported one, with inode */
  ino_t inode;
};
static struct allocation *allocations;
static pthread_rwlock_t allocations_lock = PTHREAD_RWLOCK_INITIALIZER;

static struct allocation *find(const void *address) { /* lock held */
  for (struct allocation *a = allocations; a; a = a->next)
    if ((const char *)address >= a->base && (const char *)address < a->base + a->size) return a;
  return NULL;
}
static void add(struct allocation *a) {
  pthread_rwlock_wrlock(&allocations_lock);
  a->next = allocations;
  allocations = a;
  pthread_rwlock_unlock(&allocations_lock);
}
static struct allocation *take(const void *base, enum kind kind) { /* unlink it if this was its last user */
  struct allocation *found = NULL;
  pthread_rwlock_wrlock(&allocations_lock);
  for (struct allocation **a = &allocations; *a; a = &(*a)->next)
    if ((*a)->base == (const char *)base && (*a)->kind == kind) {
      found = *a;
      if (--found->users <= 0) *a = found->next;
      break;
    }
  pthread_rwlock_unlock(&allocations_lock);
  return found;
}

static char *map_guarded(int fd, size_t bytes) {
  char *base = mmap(NULL, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return NULL;
  if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    munmap(base, bytes + PAGE);
    return NULL;
  }
  return base;
}
static void unmap(struct allocation *a) {
  munmap(a->base, a->mapped + PAGE);
  close(a->fd);
  free(a);
}

API hipError_t hipMalloc(void **address, size_t size) {
  READY();
  *address = NULL;
  if (!size) return SUCCESS;
  struct allocation *a = calloc(1, sizeof *a);
  a->size = size;
  a->mapped = (size + PAGE - 1) / PAGE * PAGE;
  a->kind = OWN;
  a->device = current_device;
  a->users = 1;
  a->fd = memfd_create("hipemu", MFD_CLOEXEC);
  if (a->fd < 0 || ftruncate(a->fd, (off_t)a->mapped) || !(a->base = map_guarded(a->fd, a->mapped))) {
    if (a->fd >= 0) close(a->fd);
    free(a);
    return result(OUT_OF_MEMORY);
  }
  add(a);
  *address = a->base;
  return SUCCESS;
}
API hipError_t hipExtMallocWithFlags(void **address, size_t size, unsigned flags) {
  (void)flags;
  return hipMalloc(address, size);
}
API hipError_t hipDeviceSynchronize(void);
API hipError_t hipFree(void *address) {
  READY();
  if (!address) return SUCCESS;
  hipDeviceSynchronize(); /* the real one waits, too */
  struct allocation *a = take(address, OWN);
  if (!a) return result(INVALID_VALUE);
  unmap(a);
  return SUCCESS;
}
static hipError_t add_host(void *base, size_t size, enum kind kind) {
  struct allocation *a = calloc(1, sizeof *a);
  *a = (struct allocation){.base = base, .size = size, .kind = kind, .fd = -1, .users = 1};
  add(a);
  return SUCCESS;
}
API hipError_t hipHostMalloc(void **address, size_t size, unsigned flags) {
  READY();
  (void)flags;
  if (posix_memalign(address, PAGE, size ? size : 1)) return result(OUT_OF_MEMORY);
  return add_host(*address, size, HOST_ALLOCATED);
}
API hipError_t hipHostFree(void *address) {
  READY();
  struct allocation *a = take(address, HOST_ALLOCATED);
  if (!a) return address ? result(INVALID_VALUE) : SUCCESS;
  free(a->base);
  free(a);
  return SUCCESS;
}
API hipError_t hipHostRegister(void *address, size_t size, unsigned flags) {
  READY();
  (void)flags;
  return address && size ? add_host(address, size, HOST_REGISTERED) : result(INVALID_VALUE);
}
API hipError_t hipHostUnregister(void *address) {
  READY();
  struct allocation *a = take(address, HOST_REGISTERED);
  if (!a) return result(HOST_MEMORY_NOT_REGISTERED);
  free(a);
  return SUCCESS;
}
API hipError_t hipHostGetDevicePointer(void **device_address, void *address, unsigned flags) {
  READY();
  (void)flags;
  *device_address = address;
  return SUCCESS;
}
API hipError_t hipMemGetAddressRange(void **base, size_t *size, void *address) {
  READY();
  pthread_rwlock_rdlock(&allocations_lock);
  struct allocation *a = find(address);
  if (a && base) *base = a->base;
  if (a && size) *size = a->size;
  pthread_rwlock_unlock(&allocations_lock);
  return a ? SUCCESS : result(NOT_FOUND);
}
API hipError_t hipPointerGetAttributes(pointer_attributes *found, const void *address) {
  READY();
  memset(found, 0, sizeof *found);
  found->device = -2;
  pthread_rwlock_rdlock(&allocations_lock);
  struct allocation *a = find(address);
  if (a) {
    int on_host = a->kind == HOST_ALLOCATED || a->kind == HOST_REGISTERED;
    found->type = on_host ? MEMORY_HOST : MEMORY_DEVICE;
    found->device = a->device;
    found->devicePointer = (void *)address;
    found->hostPointer = on_host ? (void *)address : NULL;
  }
  pthread_rwlock_unlock(&allocations_lock);
  return SUCCESS;
}

/* ------------------------------------------------------------------------------------ across processes
 * A handle names a memfd of a living process and is good for as long as that has it open. */
struct handle {
  uint32_t magic, pid, fd, node_number;
  uint64_t size;
  uint64_t inode;
};
enum { MEMORY_MAGIC = 0x48454d4d, EVENT_MAGIC = 0x48454d45 };
_Static_assert(sizeof(struct handle) <= sizeof(ipc_handle), "a handle has 64 bytes");

static void fill_handle(ipc_handle *out, uint32_t magic, int fd, int number, size_t size) {
  struct stat stat;
  fstat(fd, &stat);
  struct handle h = {magic, (uint32_t)getpid(), (uint32_t)fd, (uint32_t)number, size, stat.st_ino};
  memset(out, 0, sizeof *out);
  memcpy(out, &h, sizeof h);
}
static int open_handle(const struct handle *h) { /* the descriptor, or -1 */
  char path[64];
  struct stat stat;
  snprintf(path, sizeof path, "/proc/%u/fd/%u", h->pid, h->fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd >= 0 && (fstat(fd, &stat) || stat.st_ino != h->inode)) {
    close(fd);
    fd = -1;
  }
  return fd;
}

API hipError_t hipIpcGetMemHandle(ipc_handle *out, void *address) {
  READY();
  if (KNOB(fail_ipc_export)) return result((hipError_t)KNOB(fail_ipc_export));
  pthread_rwlock_rdlock(&allocations_lock);
  struct allocation *a = find(address);
  int exportable = a && a->kind == OWN; /* memory that was imported cannot be exported again */
  if (exportable) fill_handle(out, MEMORY_MAGIC, a->fd, node_number[a->device], a->size);
  pthread_rwlock_unlock(&allocations_lock);
  return exportable ? SUCCESS : result(INVALID_VALUE);
}
API hipError_t hipIpcOpenMemHandle(void **address, ipc_handle in, unsigned flags) {
  READY();
  (void)flags;
  struct handle h;
  memcpy(&h, &in, sizeof h);
  if (KNOB(fail_ipc_open)) return result((hipError_t)KNOB(fail_ipc_open));
  if (h.magic != MEMORY_MAGIC) return result(INVALID_VALUE);
  if ((pid_t)h.pid == getpid()) return result(INVALID_CONTEXT);
  pthread_rwlock_wrlock(&allocations_lock);
  for (struct allocation *a = allocations; a; a = a->next)
    if (a->kind == IMPORTED && a->owner == (pid_t)h.pid && a->inode == h.inode) {
      a->users++;
      *address = a->base;
      pthread_rwlock_unlock(&allocations_lock);
      COUNT(ipc_opened);
      return SUCCESS;
    }
  pthread_rwlock_unlock(&allocations_lock);
  int fd = open_handle(&h);
  if (fd < 0) return result(INVALID_VALUE);
  struct allocation *a = calloc(1, sizeof *a);
  a->size = h.size;
  a->mapped = (h.size + PAGE - 1) / PAGE * PAGE;
  a->kind = IMPORTED;
  a->fd = fd;
  a->users = 1;
  a->owner = (pid_t)h.pid;
  a->inode = h.inode;
  a->device = current_device; /* unless its own device is visible here */
  for (int i = 0; i < device_count; i++)
    if (node_number[i] == (int)h.node_number) a->device = i;
  if (!(a->base = map_guarded(fd, a->mapped))) {
    close(fd);
    free(a);
    return result(MAP_FAILED_);
  }
  add(a);
  COUNT(ipc_opened);
  *address = a->base;
  return SUCCESS;
}
static int is_in_use(const char *base, size_t size);
API hipError_t hipIpcCloseMemHandle(void *address) {
  READY();
  struct allocation *a = take(address, IMPORTED);
  if (!a) return result(INVALID_VALUE);
  COUNT(ipc_closed);
  if (a->users > 0) return SUCCESS;
  if (is_in_use(a->base, a->size)) {
    fprintf(stderr, "hipemu: a mapping was closed under a copy that has not landed\n");
    abort();
  }
  unmap(a);
  return SUCCESS;
}

/* ---------------------------------------------------------------------------------------- streams, events */
struct event_state { /* shared between processes for an interprocess event */
  _Atomic uint64_t recorded, happened;
};
struct event {
  struct event_state *state;
  int device, fd; /* fd of an interprocess one, else -1 */
};
enum action { COPY, FILL, RECORD, WAIT };
struct operation {
  struct operation *next;
  enum action action;
  void *target;
  const void *source;
  size_t size;
  int value;
  uint64_t due_ns;
  struct event_state *event;
  uint64_t tick;
};
struct stream {
  struct stream *next;
  int device;
  struct operation *head, **tail;
};
static struct stream default_stream, *streams;
static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queued, progressed;
static int executor_runs;
static long pending;

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
static int can_run(const struct operation *o) {
  if (o->action == RECORD) return 1;
  if (o->action == WAIT) return atomic_load(&o->event->happened) >= o->tick;
  return !KNOB(hold) && now_ns() >= o->due_ns;
}
static void run(const struct operation *o) {
  if (o->action == COPY) memmove(o->target, o->source, o->size);
  if (o->action == FILL) memset(o->target, o->value, o->size);
  if (o->action == RECORD) atomic_store(&o->event->happened, o->tick);
}
static void *execute(void *unused) {
  (void)unused;
  pthread_mutex_lock(&queue_lock);
  for (;;) {
    int ran = 0;
    for (struct stream *s = streams; s; s = s->next) {
      struct operation *o = s->head;
      if (!o || !can_run(o)) continue;
      run(o);
      if (!(s->head = o->next)) s->tail = &s->head;
      free(o);
      pending--;
      ran = 1;
    }
    if (ran) {
      pthread_cond_broadcast(&progressed);
    } else if (!pending) {
      pthread_cond_wait(&queued, &queue_lock);
    } else { /* a knob, the clock or another process lets it go on */
      uint64_t until = now_ns() + POLL_US * 1000u;
      struct timespec when = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
      pthread_cond_timedwait(&queued, &queue_lock, &when);
    }
  }
  return NULL;
}
static void start_executor(void) { /* lock held */
  if (executor_runs) return;
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&queued, &monotonic);
  pthread_cond_init(&progressed, &monotonic);
  default_stream.tail = &default_stream.head;
  default_stream.next = streams;
  streams = &default_stream;
  pthread_t thread;
  pthread_create(&thread, NULL, execute, NULL);
  pthread_detach(thread);
  executor_runs = 1;
}
static void submit(struct stream *s, struct operation o) { /* runs it at once if nothing keeps it */
  pthread_mutex_lock(&queue_lock);
  start_executor();
  o.due_ns = now_ns() + (uint64_t)KNOB(latency_us) * 1000u;
  if (!s->head && can_run(&o)) {
    run(&o);
  } else {
    struct operation *queued_one = malloc(sizeof o);
    *queued_one = o;
    queued_one->next = NULL;
    *s->tail = queued_one;
    s->tail = &queued_one->next;
    pending++;
    pthread_cond_signal(&queued);
  }
  pthread_mutex_unlock(&queue_lock);
}
static int is_in_use(const char *base, size_t size) {
  int found = 0;
  pthread_mutex_lock(&queue_lock);
  for (struct stream *s = streams; s; s = s->next)
    for (struct operation *o = s->head; o; o = o->next) {
      const char *target = o->target, *source = o->source;
      if (target && target >= base && target < base + size) found = 1;
      if (source && source >= base && source < base + size) found = 1;
    }
  pthread_mutex_unlock(&queue_lock);
  return found;
}
static void wait_until_empty(struct stream *s) { /* NULL: all of them */
  pthread_mutex_lock(&queue_lock);
  start_executor();
  while (s ? s->head != NULL : pending > 0) pthread_cond_wait(&progressed, &queue_lock);
  pthread_mutex_unlock(&queue_lock);
}

API hipError_t hipDeviceSynchronize(void) {
  READY();
  COUNT(device_waits);
  wait_until_empty(NULL);
  return SUCCESS;
}
API hipError_t hipStreamCreateWithFlags(void **out, unsigned flags) {
  READY();
  (void)flags;
  struct stream *s = calloc(1, sizeof *s);
  s->device = current_device;
  s->tail = &s->head;
  pthread_mutex_lock(&queue_lock);
  start_executor();
  s->next = streams;
  streams = s;
  pthread_mutex_unlock(&queue_lock);
  COUNT(streams_made);
  *out = s;
  return SUCCESS;
}
API hipError_t hipStreamCreate(void **out) { return hipStreamCreateWithFlags(out, 0); }
API hipError_t hipStreamSynchronize(void *stream) {
  READY();
  wait_until_empty(stream ? stream : &default_stream);
  return SUCCESS;
}
API hipError_t hipStreamDestroy(void *stream) {
  READY();
  if (!stream) return result(INVALID_HANDLE);
  wait_until_empty(stream);
  pthread_mutex_lock(&queue_lock);
  for (struct stream **s = &streams; *s; s = &(*s)->next)
    if (*s == stream) {
      *s = (*s)->next;
      break;
    }
  pthread_mutex_unlock(&queue_lock);
  free(stream);
  COUNT(streams_gone);
  return SUCCESS;
}

static struct event *new_event(int fd) { /* takes over fd; NULL if it cannot be mapped */
  struct event *e = calloc(1, sizeof *e);
  e->fd = fd;
  e->device = current_device;
  e->state = fd < 0 ? calloc(1, sizeof *e->state) : mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (e->state == MAP_FAILED) {
    close(fd);
    free(e);
    return NULL;
  }
  COUNT(events_made);
  return e;
}
API hipError_t hipEventCreateWithFlags(void **out, unsigned flags) {
  READY();
  int fd = -1;
  if (flags & EVENT_INTERPROCESS) {
    fd = memfd_create("hipemu-event", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, PAGE)) return result(OUT_OF_MEMORY);
  }
  *out = new_event(fd);
  return *out ? SUCCESS : result(OUT_OF_MEMORY);
}
API hipError_t hipEventCreate(void **out) { return hipEventCreateWithFlags(out, 0); }
API hipError_t hipIpcGetEventHandle(ipc_handle *out, void *event) {
  READY();
  struct event *e = event;
  if (!e || e->fd < 0) return result(INVALID_HANDLE);
  fill_handle(out, EVENT_MAGIC, e->fd, node_number[e->device], PAGE);
  return SUCCESS;
}
API hipError_t hipIpcOpenEventHandle(void **out, ipc_handle in) {
  READY();
  struct handle h;
  memcpy(&h, &in, sizeof h);
  int fd = h.magic == EVENT_MAGIC ? open_handle(&h) : -1;
  *out = fd < 0 ? NULL : new_event(fd);
  return *out ? SUCCESS : result(INVALID_VALUE);
}
API hipError_t hipEventDestroy(void *event) {
  READY();
  struct event *e = event;
  if (!e) return result(INVALID_HANDLE);
  wait_until_empty(NULL);
  if (e->fd >= 0) {
    munmap(e->state, PAGE);
    close(e->fd);
  } else {
    free(e->state);
  }
  free(e);
  COUNT(events_gone);
  return SUCCESS;
}
API hipError_t hipEventRecord(void *event, void *stream) {
  READY();
  struct event *e = event;
  struct stream *s = stream ? stream : &default_stream;
  if (!e || (stream && s->device != e->device)) return result(INVALID_HANDLE);
  uint64_t tick = atomic_fetch_add(&e->state->recorded, 1) + 1;
  submit(s, (struct operation){.action = RECORD, .event = e->state, .tick = tick});
  return SUCCESS;
}
static int has_happened(struct event *e) {
  return atomic_load(&e->state->happened) >= atomic_load(&e->state->recorded);
}
API hipError_t hipEventQuery(void *event) {
  READY();
  COUNT(event_queries);
  if (!has_happened(event)) return result(NOT_READY);
  long fault = KNOB(fail_event);
  if (!fault) return SUCCESS;
  TURN(fail_event, 0);
  return result((hipError_t)fault);
}
API hipError_t hipEventSynchronize(void *event) {
  READY();
  struct event *e = event;
  while (!has_happened(e)) usleep(POLL_US); /* another process may be the one that records it */
  return SUCCESS;
}
API hipError_t hipStreamWaitEvent(void *stream, void *event, unsigned flags) {
  READY();
  (void)flags;
  struct event *e = event;
  if (!e) return result(INVALID_HANDLE);
  uint64_t tick = atomic_load(&e->state->recorded);
  submit(stream ? stream : &default_stream, (struct operation){.action = WAIT, .event = e->state, .tick = tick});
  return SUCCESS;
}

/* -------------------------------------------------------------------------------------------------- copies */
static int leaves_allocation(const void *address, size_t size) { /* unknown addresses count as host memory */
  pthread_rwlock_rdlock(&allocations_lock);
  struct allocation *a = find(address);
  int leaves = a && size > (size_t)(a->base + a->size - (const char *)address);
  pthread_rwlock_unlock(&allocations_lock);
  return leaves;
}
static hipError_t enqueue(void *stream, struct operation o) {
  READY();
  if (!o.size) return SUCCESS;
  long fail = KNOB(fail_copy);
  if (fail > 0) {
    TURN(fail_copy, fail - 1);
    if (fail == 1) return result(KNOB(fail_code) ? (hipError_t)KNOB(fail_code) : INVALID_VALUE);
  }
  if (!o.target || leaves_allocation(o.target, o.size)) return result(INVALID_VALUE);
  if (o.action == COPY && (!o.source || leaves_allocation(o.source, o.size))) return result(INVALID_VALUE);
  COUNT(copies);
  submit(stream ? stream : &default_stream, o);
  return SUCCESS;
}
API hipError_t hipMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
  (void)kind;
  return enqueue(stream, (struct operation){.action = COPY, .target = target, .source = source, .size = size});
}
API hipError_t hipMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device,
                                  size_t size, void *stream) {
  READY();
  if (!is_device(target_device) || !is_device(source_device)) return result(INVALID_DEVICE);
  return hipMemcpyAsync(target, source, size, 0, stream);
}
API hipError_t hipMemsetAsync(void *target, int value, size_t size, void *stream) {
  return enqueue(stream, (struct operation){.action = FILL, .target = target, .value = value, .size = size});
}
/* Synchronous ones do not go through a stream: tests look into memory while copies are held. */
API hipError_t hipMemcpy(void *target, const void *source, size_t size, int kind) {
  READY();
  (void)kind;
  if (!target || !source || leaves_allocation(target, size) || leaves_allocation(source, size))
    return result(INVALID_VALUE);
  memmove(target, source, size);
  return SUCCESS;
}
API hipError_t hipMemset(void *target, int value, size_t size) {
  READY();
  if (!target || leaves_allocation(target, size)) return result(INVALID_VALUE);
  memset(target, value, size);
  return SUCCESS;
}
