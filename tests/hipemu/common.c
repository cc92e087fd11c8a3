/* What the emulated runtime and the CUDA forwarder share: the block of knobs, error texts, and the calls by which
 * the wheel's own GPU code registers itself when it is loaded. */
#define _GNU_SOURCE
#include "hip_abi.h"
#include "knobs.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static _Atomic long own_block[BLOCK_SLOTS];
_Atomic long *hipemu_block = own_block;

void hipemu_open_block(void) {
  const char *path = getenv("HIPEMU_BLOCK");
  if (!path || !*path) return;
  int fd = open(path, O_RDWR | O_CLOEXEC);
  void *block = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof own_block, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (block == MAP_FAILED) {
    fprintf(stderr, "hipemu: cannot map HIPEMU_BLOCK=%s\n", path);
    abort();
  }
  close(fd);
  hipemu_block = block;
}

API const char *hipGetErrorString(hipError_t error) {
  switch (error) {
    case SUCCESS: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NOT_INITIALIZED: return "initialization error";
    case NO_DEVICE: return "no ROCm-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case INVALID_CONTEXT: return "invalid device context";
    case MAP_FAILED_: return "mapping of buffer object failed";
    case INVALID_HANDLE: return "invalid resource handle";
    case NOT_FOUND: return "named symbol not found";
    case NOT_READY: return "device not ready";
    case 700: return "an illegal memory access was encountered";
    case PEER_ACCESS_ALREADY_ENABLED: return "peer access is already enabled";
    case 719: return "unspecified launch failure";
    case NOT_SUPPORTED: return "operation not supported";
    default: return "unknown error";
  }
}
API const char *hipGetErrorName(hipError_t error) { return error ? "hipError" : "hipSuccess"; }

API void **__hipRegisterFatBinary(const void *data) {
  static void *module[4];
  (void)data;
  return module;
}
API void __hipUnregisterFatBinary(void **module) { (void)module; }
API void __hipRegisterFunction(void **module, const void *host, char *device, const char *name, unsigned limit,
                               void *thread_id, void *block_id, void *block_dim, void *grid_dim, int *warp_size) {
  (void)module, (void)host, (void)device, (void)name, (void)limit;
  (void)thread_id, (void)block_id, (void)block_dim, (void)grid_dim, (void)warp_size;
}
