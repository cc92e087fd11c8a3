/* A HIP runtime that passes every call on to the CUDA runtime, so that code written for HIP moves bytes between
 * NVIDIA GPUs. Flags, copy kinds and the error numbers that callers compare are the same in both, so they pass
 * through as they are. The knobs for failures work here too; those that delay copies do not.
 */
#define _GNU_SOURCE
#include "hip_abi.h"
#include "knobs.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(ipc_handle), "memory handles are 64 bytes in both");
_Static_assert(sizeof(cudaIpcEventHandle_t) == sizeof(ipc_handle), "event handles are 64 bytes in both");

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local hipError_t injected;

static hipError_t pass(cudaError_t error) { return (hipError_t)error; }
static hipError_t inject(long error) { return injected = (hipError_t)error; }
#define READY() pthread_once(&once, hipemu_open_block)

API hipError_t hipGetLastError(void) {
  hipError_t error = injected;
  injected = SUCCESS;
  hipError_t last = pass(cudaGetLastError());
  return error ? error : last;
}
API hipError_t hipPeekAtLastError(void) { return injected ? injected : pass(cudaPeekAtLastError()); }

/* ------------------------------------------------------------------------------------------------- devices */
API hipError_t hipInit(unsigned flags) {
  (void)flags;
  READY();
  return pass(cudaFree(0));
}
API hipError_t hipRuntimeGetVersion(int *version) { return pass(cudaRuntimeGetVersion(version)); }
API hipError_t hipDriverGetVersion(int *version) { return pass(cudaDriverGetVersion(version)); }
API hipError_t hipGetDeviceCount(int *count) {
  READY();
  return pass(cudaGetDeviceCount(count));
}
API hipError_t hipGetDevice(int *device) { return pass(cudaGetDevice(device)); }
API hipError_t hipSetDevice(int device) {
  READY();
  return pass(cudaSetDevice(device));
}
API hipError_t hipDeviceGetPCIBusId(char *text, int length, int device) {
  return pass(cudaDeviceGetPCIBusId(text, length, device));
}
API hipError_t hipDeviceGetByPCIBusId(int *device, const char *text) {
  return pass(cudaDeviceGetByPCIBusId(device, text));
}
API hipError_t hipDeviceCanAccessPeer(int *answer, int device, int peer) {
  READY();
  hipError_t error = pass(cudaDeviceCanAccessPeer(answer, device, peer));
  if (KNOB(no_peer_access)) *answer = 0;
  return error;
}
API hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  return pass(cudaDeviceEnablePeerAccess(peer, flags));
}
API hipError_t hipDeviceGetAttribute(int *value, int attribute, int device) {
  (void)attribute, (void)device; /* attributes have other numbers in HIP */
  *value = 0;
  return SUCCESS;
}
API hipError_t hipGetDevicePropertiesR0600(char *properties, int device) {
  struct cudaDeviceProp found;
  hipError_t error = pass(cudaGetDeviceProperties(&found, device));
  if (error) return error;
  memset(properties, 0, PROPERTIES_BYTES);
  snprintf(properties, 256, "%s", found.name);
  *(size_t *)(void *)(properties + PROPERTIES_TOTAL_MEMORY) = found.totalGlobalMem;
  strcpy(properties + PROPERTIES_ARCH_NAME, "gfx942");
  return SUCCESS;
}
API hipError_t hipMemGetInfo(size_t *free_bytes, size_t *total) { return pass(cudaMemGetInfo(free_bytes, total)); }
API hipError_t hipDeviceSynchronize(void) {
  COUNT(device_waits);
  return pass(cudaDeviceSynchronize());
}

/* -------------------------------------------------------------------------------------------------- memory */
API hipError_t hipMalloc(void **address, size_t size) {
  READY();
  return pass(cudaMalloc(address, size));
}
API hipError_t hipExtMallocWithFlags(void **address, size_t size, unsigned flags) {
  (void)flags;
  return hipMalloc(address, size);
}
API hipError_t hipFree(void *address) { return pass(cudaFree(address)); }
API hipError_t hipHostMalloc(void **address, size_t size, unsigned flags) {
  (void)flags;
  return pass(cudaHostAlloc(address, size, cudaHostAllocPortable));
}
API hipError_t hipHostFree(void *address) { return pass(cudaFreeHost(address)); }
API hipError_t hipHostRegister(void *address, size_t size, unsigned flags) {
  (void)flags;
  return pass(cudaHostRegister(address, size, cudaHostRegisterPortable));
}
API hipError_t hipHostUnregister(void *address) { return pass(cudaHostUnregister(address)); }
API hipError_t hipHostGetDevicePointer(void **device_address, void *address, unsigned flags) {
  return pass(cudaHostGetDevicePointer(device_address, address, flags));
}
API hipError_t hipMemGetAddressRange(void **base, size_t *size, void *address) {
  static int (*range)(unsigned long long *, size_t *, unsigned long long); /* the driver's: cudart has none */
  if (!range) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver) *(void **)&range = dlsym(driver, "cuMemGetAddressRange_v2");
    if (!range) return inject(NOT_SUPPORTED);
  }
  unsigned long long found = 0;
  size_t bytes = 0;
  int error = range(&found, &bytes, (unsigned long long)address);
  if (error) return inject(error);
  if (base) *base = (void *)found;
  if (size) *size = bytes;
  return SUCCESS;
}
API hipError_t hipPointerGetAttributes(pointer_attributes *out, const void *address) {
  struct cudaPointerAttributes found;
  hipError_t error = pass(cudaPointerGetAttributes(&found, address));
  if (error) return error;
  *out = (pointer_attributes){.type = (int)found.type,
                              .device = found.device,
                              .devicePointer = found.devicePointer,
                              .hostPointer = found.hostPointer,
                              .isManaged = found.type == cudaMemoryTypeManaged};
  return SUCCESS;
}
API hipError_t hipIpcGetMemHandle(ipc_handle *out, void *address) {
  READY();
  if (KNOB(fail_ipc_export)) return inject(KNOB(fail_ipc_export));
  return pass(cudaIpcGetMemHandle((cudaIpcMemHandle_t *)out, address));
}
API hipError_t hipIpcOpenMemHandle(void **address, ipc_handle in, unsigned flags) {
  READY();
  (void)flags;
  if (KNOB(fail_ipc_open)) return inject(KNOB(fail_ipc_open));
  cudaIpcMemHandle_t handle;
  memcpy(&handle, &in, sizeof handle);
  hipError_t error = pass(cudaIpcOpenMemHandle(address, handle, cudaIpcMemLazyEnablePeerAccess));
  if (!error) COUNT(ipc_opened);
  return error;
}
API hipError_t hipIpcCloseMemHandle(void *address) {
  COUNT(ipc_closed);
  return pass(cudaIpcCloseMemHandle(address));
}

/* ---------------------------------------------------------------------------------------- streams, events */
API hipError_t hipStreamCreateWithFlags(void **stream, unsigned flags) {
  COUNT(streams_made);
  return pass(cudaStreamCreateWithFlags((cudaStream_t *)stream, flags));
}
API hipError_t hipStreamCreate(void **stream) { return hipStreamCreateWithFlags(stream, 0); }
API hipError_t hipStreamSynchronize(void *stream) { return pass(cudaStreamSynchronize(stream)); }
API hipError_t hipStreamDestroy(void *stream) {
  COUNT(streams_gone);
  return pass(cudaStreamDestroy(stream));
}
API hipError_t hipStreamWaitEvent(void *stream, void *event, unsigned flags) {
  (void)flags;
  return pass(cudaStreamWaitEvent(stream, event, 0));
}
API hipError_t hipEventCreateWithFlags(void **event, unsigned flags) {
  COUNT(events_made);
  /* HIP has flags that CUDA has not; these three are common */
  return pass(cudaEventCreateWithFlags((cudaEvent_t *)event, flags & 7));
}
API hipError_t hipEventCreate(void **event) { return hipEventCreateWithFlags(event, 0); }
API hipError_t hipEventDestroy(void *event) {
  COUNT(events_gone);
  return pass(cudaEventDestroy(event));
}
API hipError_t hipEventRecord(void *event, void *stream) { return pass(cudaEventRecord(event, stream)); }
API hipError_t hipEventQuery(void *event) {
  COUNT(event_queries);
  return pass(cudaEventQuery(event));
}
API hipError_t hipEventSynchronize(void *event) { return pass(cudaEventSynchronize(event)); }
API hipError_t hipIpcGetEventHandle(ipc_handle *out, void *event) {
  return pass(cudaIpcGetEventHandle((cudaIpcEventHandle_t *)out, event));
}
API hipError_t hipIpcOpenEventHandle(void **event, ipc_handle in) {
  cudaIpcEventHandle_t handle;
  memcpy(&handle, &in, sizeof handle);
  return pass(cudaIpcOpenEventHandle((cudaEvent_t *)event, handle));
}

/* -------------------------------------------------------------------------------------------------- copies */
static hipError_t refusal(void) { /* of the next copy, if a test asked for it */
  long fail = KNOB(fail_copy);
  if (fail <= 0) {
    COUNT(copies);
    return SUCCESS;
  }
  TURN(fail_copy, fail - 1);
  return fail > 1 ? SUCCESS : inject(KNOB(fail_code) ? KNOB(fail_code) : INVALID_VALUE);
}
API hipError_t hipMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
  (void)kind;
  hipError_t error = refusal();
  return error ? error : pass(cudaMemcpyAsync(target, source, size, cudaMemcpyDefault, stream));
}
API hipError_t hipMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device,
                                  size_t size, void *stream) {
  hipError_t error = refusal();
  return error ? error : pass(cudaMemcpyPeerAsync(target, target_device, source, source_device, size, stream));
}
API hipError_t hipMemcpy(void *target, const void *source, size_t size, int kind) {
  (void)kind;
  return pass(cudaMemcpy(target, source, size, cudaMemcpyDefault));
}
API hipError_t hipMemset(void *target, int value, size_t size) { return pass(cudaMemset(target, value, size)); }
API hipError_t hipMemsetAsync(void *target, int value, size_t size, void *stream) {
  return pass(cudaMemsetAsync(target, value, size, stream));
}
