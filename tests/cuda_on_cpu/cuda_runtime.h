// Stands in for CUDA's cuda_runtime.h: with this folder on the include path, g++ compiles an unmodified .cu file as C++
// and runs its kernels on the CPU.
//
// Model: a launch spreads its blocks over a few OS threads (workers) and returns when all are done. A worker runs one
// block at a time. Each CUDA thread of the block is a fiber which runs until it waits in a barrier or a warp
// collective, or returns; then the scheduler picks another one that is ready. A fiber that spins on memory is never
// preempted.
//
// Schedules (environment, read at every launch):
//   CUSHIM_ORDER=forward   always the first ready thread of the block: warp 0 runs as far ahead as barriers let it
//   CUSHIM_ORDER=reverse   always the last one, and the blocks backwards
//   CUSHIM_ORDER=random    any one, and the blocks shuffled, drawn from CUSHIM_SEED
//   CUSHIM_WORKERS=n       OS threads
// As nobody waits without a barrier, a missing one shows as a wrong result in at least one schedule, unless a
// collective happens to make the same threads meet there. Shared memory starts as 0xff bytes (NaN), and so does what a
// shuffle reads from a lane that does not take part.
//
// With -fsanitize=thread races are reported even where the schedule hides them: only __syncthreads, __syncwarp, and
// atomics after a __threadfence order memory; two blocks on one worker count as ordered, others do not. With
// -fsanitize=address __shared__ arrays and dynamic shared memory have red zones; there is one worker then, and
// __shared__ arrays are not poisoned.
//
// Dynamic shared memory is the one thing that C++ cannot spell as CUDA does. A kernel writes DYNAMIC_SHARED(float,
// tile); and its file, after the includes, defines that macro for nvcc unless the shim already has:
//   #ifndef DYNAMIC_SHARED
//   #define DYNAMIC_SHARED(T, name) extern __shared__ __align__(16) unsigned char dynamic_shared[]; (continued)
//     T* name = reinterpret_cast<T*>(dynamic_shared)
//   #endif
#pragma once

#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <source_location>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static
#if defined(__SANITIZE_ADDRESS__)
// thread_local variables get no red zones
#define __shared__ static
#else
#define __shared__ static thread_local
#endif
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(cushim::block->dynamic_shared)

// the scheduler's own data is invisible to the race checker; inlined, the attribute would be lost
#define CUSHIM_INTERNAL __attribute__((noinline, no_sanitize("thread")))
// two libraries built with the shim can live in one process: each keeps its own state
#define CUSHIM_HIDDEN __attribute__((visibility("hidden")))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define CUSHIM_VECTOR_TYPES(T, name)                         \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };         \
  struct alignas(16) name##4 { T x, y, z, w; };              \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUSHIM_VECTOR_TYPES(float, float)
CUSHIM_VECTOR_TYPES(int, int)
CUSHIM_VECTOR_TYPES(unsigned, uint)
#undef CUSHIM_VECTOR_TYPES
struct alignas(16) double2 {
  double x, y;
};
inline double2 make_double2(double x, double y) { return {x, y}; }

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
typedef struct CUstream_st* cudaStream_t;
struct cudaLaunchAttribute {};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

constexpr int warpSize = 32;
CUSHIM_HIDDEN inline thread_local uint3 threadIdx, blockIdx;
CUSHIM_HIDDEN inline thread_local dim3 blockDim, gridDim;

namespace cushim CUSHIM_HIDDEN {

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 256 << 10;
// what a kernel may ask for without, and with, cudaFuncSetAttribute; the second is the limit of sm_90
constexpr size_t kDefaultSharedBytes = 48 << 10;
constexpr size_t kMaxSharedBytes = 227 << 10;

struct Context {
  ucontext_t registers;
  void* stack = nullptr;
  size_t stack_bytes = 0;
  void* tsan_fiber = nullptr;
  void* asan_fake_stack = nullptr;
};

enum class State : uint8_t { kReady, kInWarp, kInBlock, kDone };
enum class Order { kForward, kReverse, kRandom };

struct Fiber {
  Context context;
  uint3 thread_index;
  State state;
  // memory written before an atomic is visible to whoever sees the atomic, once the thread has fenced
  bool fenced;
  // what the thread waits for
  const char* collective;
  std::source_location where;
  uint32_t mask;
  // what a lane gives to the lanes of its mask, whose value it wants (or kVote), and what it gets
  uint64_t offered;
  int source_lane;
  uint64_t received;
};
constexpr int kVote = -1;

struct Block {
  uint3 index;
  int threads = 0, fibers_created = 0, alive = 0, in_barrier = 0;
  Order order;
  uint64_t random_state;
  // the threads that can run, bit by bit, in the order of the schedule
  uint64_t ready[kMaxThreads / 64];
  Fiber fibers[kMaxThreads];
  Fiber* running = nullptr;
  Fiber* first_in_barrier = nullptr;
  Context scheduler;
  char* stacks = nullptr;
  void* dynamic_shared = nullptr;
  void (*kernel)(void*);
  void* arguments;
  // why the block was given up; empty as long as all is well
  char message[512] = "";
};

inline thread_local Block* block;
inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local char last_message[512];

CUSHIM_INTERNAL inline void switch_context(Context& from, Context& to, [[maybe_unused]] bool for_good = false) {
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.asan_fake_stack, to.stack, to.stack_bytes);
#endif
  swapcontext(&from.registers, &to.registers);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.asan_fake_stack, nullptr, nullptr);
#endif
}

// Tells the race checker that all these threads met: what one did before is visible to every other from here on.
// Done for all of them before any goes on, or those that go first would seem to be ordered with those that go later.
CUSHIM_INTERNAL inline void order_memory([[maybe_unused]] void* meeting_point, [[maybe_unused]] Context* const* met,
                                         [[maybe_unused]] int count) {
#if defined(__SANITIZE_THREAD__)
  void* self = __tsan_get_current_fiber();
  for (int i = 0; i < count; ++i) {
    __tsan_switch_to_fiber(met[i]->tsan_fiber, __tsan_switch_to_fiber_no_sync);
    __tsan_release(meeting_point);
  }
  for (int i = 0; i < count; ++i) {
    __tsan_switch_to_fiber(met[i]->tsan_fiber, __tsan_switch_to_fiber_no_sync);
    __tsan_acquire(meeting_point);
  }
  __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
#endif
}

CUSHIM_INTERNAL inline void order_block_memory(Block& b, bool with_scheduler) {
  Context* met[kMaxThreads + 1];
  int count = 0;
  for (int i = 0; i < b.threads; ++i) met[count++] = &b.fibers[i].context;
  if (with_scheduler) met[count++] = &b.scheduler;
  order_memory(&b, met, count);
}

CUSHIM_INTERNAL inline int index_of(const Block& b, const Fiber& fiber) { return int(&fiber - b.fibers); }

__attribute__((format(printf, 3, 4))) CUSHIM_INTERNAL inline void fail(Block& b, const Fiber& fiber, const char* format,
                                                                       ...) {
  char reason[320];
  va_list values;
  va_start(values, format);
  vsnprintf(reason, sizeof reason, format, values);
  va_end(values);
  const uint3 t = fiber.thread_index, i = b.index;
  snprintf(b.message, sizeof b.message, "thread (%u,%u,%u) of block (%u,%u,%u) %s", t.x, t.y, t.z, i.x, i.y, i.z,
           reason);
}

CUSHIM_INTERNAL inline void set_ready(Block& b, Fiber& fiber, bool ready) {
  const int i = index_of(b, fiber), rank = b.order == Order::kReverse ? b.threads - 1 - i : i;
  const uint64_t bit = uint64_t(1) << (rank % 64);
  b.ready[rank / 64] = ready ? b.ready[rank / 64] | bit : b.ready[rank / 64] & ~bit;
  if (ready) fiber.state = State::kReady;
}

// splitmix64
CUSHIM_INTERNAL inline uint64_t draw(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

CUSHIM_INTERNAL inline Fiber* next_ready(Block& b) {
  const int words = (b.threads + 63) / 64;
  const int start = b.order == Order::kRandom ? int(draw(b.random_state) % b.threads) : 0;
  for (int k = 0; k <= words; ++k) {
    const int word = (start / 64 + k) % words;
    // bits before the start are left for the last round
    const uint64_t bits = k == 0 ? b.ready[word] >> (start % 64) << (start % 64) : b.ready[word];
    if (!bits) continue;
    const int rank = word * 64 + __builtin_ctzll(bits);
    return &b.fibers[b.order == Order::kReverse ? b.threads - 1 - rank : rank];
  }
  return nullptr;
}

CUSHIM_INTERNAL inline void arrive_in_block(Block& b, Fiber& fiber) {
  if (b.alive < b.threads) {
    return fail(b, fiber, "is in __syncthreads (line %u), but other threads of the block have returned",
                fiber.where.line());
  }
  if (b.in_barrier == 0) b.first_in_barrier = &fiber;
  const Fiber& first = *b.first_in_barrier;
  if (first.where.line() != fiber.where.line()) {
    return fail(b, fiber, "is in __syncthreads at line %u, but thread %d in __syncthreads at line %u: divergent code",
                fiber.where.line(), index_of(b, first), first.where.line());
  }
  if (++b.in_barrier < b.threads) return;
  b.in_barrier = 0;
  order_block_memory(b, false);
  for (int i = 0; i < b.threads; ++i) set_ready(b, b.fibers[i], true);
}

CUSHIM_INTERNAL inline void complete_collective(Block& b, Fiber* warp, uint32_t members) {
  const bool is_barrier = strcmp(warp[std::countr_zero(members)].collective, "__syncwarp") == 0;
  uint32_t votes = 0;
  for (int lane = 0; lane < warpSize; ++lane) {
    if (members >> lane & 1) votes |= uint32_t(warp[lane].offered != 0) << lane;
  }
  for (int lane = 0; lane < warpSize; ++lane) {
    if (!(members >> lane & 1)) continue;
    const int source = warp[lane].source_lane;
    if (source == kVote) {
      warp[lane].received = votes;
    } else {
      warp[lane].received = members >> source & 1 ? warp[source].offered : ~uint64_t(0);
    }
  }
  if (is_barrier) {
    Context* met[warpSize];
    int count = 0;
    for (int lane = 0; lane < warpSize; ++lane) {
      if (members >> lane & 1) met[count++] = &warp[lane].context;
    }
    // masks that share no lane have no meeting point in common
    order_memory(&warp[std::countr_zero(members)], met, count);
  }
  for (int lane = 0; lane < warpSize; ++lane) {
    if (members >> lane & 1) set_ready(b, warp[lane], true);
  }
}

// Lets the lanes of a mask go on when all that have not returned are here. Disjoint masks do not wait for each other.
CUSHIM_INTERNAL inline void try_collective(Block& b, Fiber& fiber) {
  const int lane = index_of(b, fiber) % warpSize;
  Fiber* warp = &fiber - lane;
  const int lanes = std::min(warpSize, b.threads - index_of(b, *warp));
  uint32_t members = 0;
  bool complete = true;
  for (int other = 0; other < lanes; ++other) {
    const Fiber& peer = warp[other];
    if (!(fiber.mask >> other & 1) || peer.state == State::kDone) continue;
    members |= 1u << other;
    const bool waits = peer.state == State::kInWarp;
    if (waits && peer.mask != fiber.mask && (peer.mask >> lane & 1)) {
      return fail(b, fiber, "is in %s (line %u) with mask 0x%08x, but lane %d in %s (line %u) with mask 0x%08x",
                  fiber.collective, fiber.where.line(), fiber.mask, other, peer.collective, peer.where.line(),
                  peer.mask);
    }
    if (waits && peer.mask == fiber.mask && strcmp(peer.collective, fiber.collective) != 0) {
      return fail(b, fiber, "is in %s (line %u), but lane %d of the same mask in %s (line %u)", fiber.collective,
                  fiber.where.line(), other, peer.collective, peer.where.line());
    }
    complete = complete && waits && peer.mask == fiber.mask;
  }
  if (complete) complete_collective(b, warp, members);
}

CUSHIM_INTERNAL inline void arrive_in_warp(Block& b, Fiber& fiber) {
  const int lane = index_of(b, fiber) % warpSize;
  if (!(fiber.mask >> lane & 1)) {
    return fail(b, fiber, "is in %s (line %u) with mask 0x%08x, which does not name its own lane %d", fiber.collective,
                fiber.where.line(), fiber.mask, lane);
  }
  try_collective(b, fiber);
}

CUSHIM_INTERNAL inline void finish(Block& b, Fiber& fiber) {
  --b.alive;
  if (b.in_barrier > 0) return fail(b, fiber, "returned while other threads wait in __syncthreads");
  // the lanes that are left may have waited only for this one
  Fiber* warp = &fiber - index_of(b, fiber) % warpSize;
  const int lanes = std::min(warpSize, b.threads - index_of(b, *warp));
  for (int lane = 0; lane < lanes && !b.message[0]; ++lane) {
    if (warp[lane].state == State::kInWarp) try_collective(b, warp[lane]);
  }
}

CUSHIM_INTERNAL inline void report_deadlock(Block& b) {
  const Fiber *in_block = nullptr, *in_warp = nullptr;
  for (int i = b.threads - 1; i >= 0; --i) {
    if (b.fibers[i].state == State::kInBlock) in_block = &b.fibers[i];
    if (b.fibers[i].state == State::kInWarp) in_warp = &b.fibers[i];
  }
  if (in_block) {
    return fail(
        b, *in_warp, "waits for ever in %s (line %u) with mask 0x%08x, thread %d in __syncthreads (line %u): deadlock",
        in_warp->collective, in_warp->where.line(), in_warp->mask, index_of(b, *in_block), in_block->where.line());
  }
  fail(b, *in_warp, "waits for ever in %s (line %u) with mask 0x%08x: deadlock", in_warp->collective,
       in_warp->where.line(), in_warp->mask);
}

CUSHIM_INTERNAL inline void run_thread() {
  Block* b = block;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  b->kernel(b->arguments);
  b->running->state = State::kDone;
  switch_context(b->running->context, b->scheduler, true);
}

CUSHIM_INTERNAL inline void start_thread(Block& b, Fiber& fiber) {
  const unsigned i = index_of(b, fiber);
  fiber.thread_index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
  fiber.fenced = false;
  set_ready(b, fiber, true);
  ucontext_t& registers = fiber.context.registers;
  getcontext(&registers);
  registers.uc_stack.ss_sp = fiber.context.stack;
  registers.uc_stack.ss_size = fiber.context.stack_bytes;
  registers.uc_link = nullptr;
  makecontext(&registers, run_thread, 0);
  // or the address checker forgets the red zones of the whole stack at every switch
  registers.uc_stack.ss_size = 0;
}

CUSHIM_INTERNAL inline void run_block(Block& b) {
  b.alive = b.threads;
  b.in_barrier = 0;
  // a block that was given up leaves threads that could run
  std::fill(std::begin(b.ready), std::end(b.ready), 0);
  for (int i = 0; i < b.threads; ++i) start_thread(b, b.fibers[i]);
  order_block_memory(b, true);
  while (b.alive > 0 && !b.message[0]) {
    Fiber* fiber = next_ready(b);
    if (!fiber) {
      report_deadlock(b);
      break;
    }
    b.running = fiber;
    threadIdx = fiber->thread_index;
    switch_context(b.scheduler, fiber->context);
    set_ready(b, *fiber, false);
    if (fiber->state == State::kInBlock) arrive_in_block(b, *fiber);
    if (fiber->state == State::kInWarp) arrive_in_warp(b, *fiber);
    if (fiber->state == State::kDone) finish(b, *fiber);
  }
  order_block_memory(b, true);
}

// Fills the __shared__ variables of this worker with 0xff: with the shim's own they are all that this library keeps
// per thread on a worker.
inline void poison_static_shared() {
  dl_iterate_phdr(
      [](dl_phdr_info* module, size_t, void*) {
        char* data = static_cast<char*>(module->dlpi_tls_data);
        for (int i = 0; data && i < module->dlpi_phnum; ++i) {
          const auto& header = module->dlpi_phdr[i];
          const char* ours = reinterpret_cast<char*>(&block);
          if (header.p_type != PT_TLS || ours < data || ours >= data + header.p_memsz) continue;
          Block* const saved = block;
          memset(data, 0xff, header.p_memsz);
          block = saved;
          return 1;
        }
        return 0;
      },
      nullptr);
}

inline char* map_stacks() {
  return static_cast<char*>(mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

// Fibers are kept from launch to launch: the race checker takes long to make them.
inline void create_fibers(Block& b) {
  const size_t guard = sysconf(_SC_PAGESIZE);
  if (!b.stacks) b.stacks = map_stacks();
  for (; b.fibers_created < b.threads; ++b.fibers_created) {
    Context& context = b.fibers[b.fibers_created].context;
    char* stack = b.stacks + b.fibers_created * kStackBytes;
    // stacks grow down: one that is too small ends in a crash, not in its neighbour
    mprotect(stack, guard, PROT_NONE);
    context.stack = stack + guard;
    context.stack_bytes = kStackBytes - guard;
#if defined(__SANITIZE_THREAD__)
    context.tsan_fiber = __tsan_create_fiber(0);
#endif
  }
}

// The stacks stay: threads that were given up leave red zones behind, which only a next thread may meet.
inline void destroy_fibers(Block& b) {
#if defined(__SANITIZE_THREAD__)
  for (int i = 0; i < b.fibers_created; ++i) __tsan_destroy_fiber(b.fibers[i].context.tsan_fiber);
#endif
  b.fibers_created = 0;
}

inline void describe_scheduler([[maybe_unused]] Context& scheduler) {
#if defined(__SANITIZE_THREAD__)
  scheduler.tsan_fiber = __tsan_get_current_fiber();
#endif
#if defined(__SANITIZE_ADDRESS__)
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &scheduler.stack, &scheduler.stack_bytes);
  pthread_attr_destroy(&attributes);
#endif
}

struct Settings {
  Order order = Order::kForward;
  uint64_t seed = 0;
  // more workers than cores let the race checker see more blocks that are not ordered
  unsigned workers =
#if defined(__SANITIZE_ADDRESS__)
      1;
#elif defined(__SANITIZE_THREAD__)
      4;
#else
      std::max(1u, std::thread::hardware_concurrency());
#endif
};

inline Settings read_settings() {
  Settings settings;
  const char* order = getenv("CUSHIM_ORDER");
  if (order && strcmp(order, "reverse") == 0) settings.order = Order::kReverse;
  if (order && strcmp(order, "random") == 0) settings.order = Order::kRandom;
  if (const char* seed = getenv("CUSHIM_SEED")) settings.seed = strtoull(seed, nullptr, 10);
#if !defined(__SANITIZE_ADDRESS__)
  if (const char* workers = getenv("CUSHIM_WORKERS")) settings.workers = std::max(1, atoi(workers));
#endif
  return settings;
}

inline cudaError_t set_error(cudaError_t error, const char* message) {
  last_error = error;
  snprintf(last_message, sizeof last_message, "%s", message);
  return error;
}

inline std::map<const void*, size_t>& shared_limits() {
  static std::map<const void*, size_t> limits;
  return limits;
}

inline const char* invalid_launch(const cudaLaunchConfig_t& config, const void* kernel) {
  const dim3 g = config.gridDim, b = config.blockDim;
  const uint64_t threads = uint64_t(b.x) * b.y * b.z;
  if (!g.x || !g.y || !g.z) return "invalid launch: no blocks";
  if (g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) return "invalid launch: too many blocks";
  if (!threads) return "invalid launch: no threads";
  if (threads > kMaxThreads || b.x > 1024 || b.y > 1024 || b.z > 64) return "invalid launch: too many threads a block";
  const auto limit = shared_limits().find(kernel);
  if (config.dynamicSmemBytes > (limit == shared_limits().end() ? kDefaultSharedBytes : limit->second))
    return "invalid launch: more dynamic shared memory than cudaFuncSetAttribute allowed (48 KB without it)";
  return nullptr;
}

struct Launch {
  cudaLaunchConfig_t config;
  Settings settings;
  std::vector<uint32_t> blocks;
  void (*kernel)(void*);
  void* arguments;
  std::atomic<bool> failed = false;
  char message[512] = "";
};

// runs every workers-th block of the launch
inline void work(Launch& launch, Block& b, unsigned worker, unsigned workers) {
  const dim3 grid = launch.config.gridDim, size = launch.config.blockDim;
  b.threads = size.x * size.y * size.z;
  b.order = launch.settings.order;
  b.kernel = launch.kernel;
  b.arguments = launch.arguments;
  b.message[0] = 0;
  create_fibers(b);
  describe_scheduler(b.scheduler);
  // exactly as large as asked for, so that the address checker sees one byte too many
  const size_t shared_bytes = launch.config.dynamicSmemBytes;
  const std::unique_ptr<void, decltype(&free)> shared(malloc(shared_bytes), &free);
  b.dynamic_shared = shared.get();
  block = &b;
  for (size_t i = worker; i < launch.blocks.size() && !launch.failed.load(std::memory_order_relaxed); i += workers) {
#if !defined(__SANITIZE_ADDRESS__)
    poison_static_shared();
#endif
    memset(shared.get(), 0xff, shared_bytes);
    const uint32_t number = launch.blocks[i];
    b.index = blockIdx = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    b.random_state = launch.settings.seed + number;
    blockDim = size;
    gridDim = grid;
    run_block(b);
    if (b.message[0] && !launch.failed.exchange(true)) memcpy(launch.message, b.message, sizeof launch.message);
  }
  if (b.message[0]) destroy_fibers(b);
}

inline cudaError_t run(const cudaLaunchConfig_t& config, const void* id, void (*kernel)(void*), void* arguments) {
  // kernels run in the order of their launches, whichever thread launches them
  static std::mutex stream;
  const std::lock_guard<std::mutex> in_order(stream);
  if (const char* message = invalid_launch(config, id)) return set_error(cudaErrorInvalidConfiguration, message);
  Launch launch{config, read_settings(), {}, kernel, arguments};
  launch.blocks.resize(size_t(config.gridDim.x) * config.gridDim.y * config.gridDim.z);
  std::iota(launch.blocks.begin(), launch.blocks.end(), 0u);
  if (launch.settings.order == Order::kReverse) std::reverse(launch.blocks.begin(), launch.blocks.end());
  if (launch.settings.order == Order::kRandom) {
    uint64_t state = launch.settings.seed;
    for (size_t i = launch.blocks.size(); i > 1; --i) std::swap(launch.blocks[i - 1], launch.blocks[draw(state) % i]);
  }
  // never on the caller's own thread: what it keeps per thread must not be poisoned
  const unsigned workers = unsigned(std::min<size_t>(launch.settings.workers, launch.blocks.size()));
  static std::vector<std::unique_ptr<Block>> blocks;
  while (blocks.size() < workers) blocks.push_back(std::make_unique<Block>());
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < workers; ++i) threads.emplace_back(work, std::ref(launch), std::ref(*blocks[i]), i, workers);
  for (std::thread& thread : threads) thread.join();
  return launch.failed ? set_error(cudaErrorLaunchFailure, launch.message) : cudaSuccess;
}

CUSHIM_INTERNAL inline void wait_for_block(std::source_location where) {
  Fiber& self = *block->running;
  self.state = State::kInBlock;
  self.where = where;
  switch_context(self.context, block->scheduler);
}

CUSHIM_INTERNAL inline uint64_t wait_for_warp(const char* collective, uint32_t mask, uint64_t offered, int source_lane,
                                              std::source_location where) {
  Fiber& self = *block->running;
  self.state = State::kInWarp;
  self.collective = collective;
  self.where = where;
  self.mask = mask;
  self.offered = offered;
  self.source_lane = source_lane;
  switch_context(self.context, block->scheduler);
  return self.received;
}

CUSHIM_INTERNAL inline int lane() { return index_of(*block, *block->running) % warpSize; }

template <class T, class... Options>
concept OneOf = (std::same_as<T, Options> || ...);
template <class T>
concept Shuffled = OneOf<T, int, unsigned, long, unsigned long, long long, unsigned long long, float, double>;

// a lane outside of the segment reads itself
template <Shuffled T>
T shuffle(const char* name, uint32_t mask, T value, int source, int width, std::source_location where) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  if (source < 0 || source / width != lane() / width) source = lane();
  return std::bit_cast<T>(Bits(wait_for_warp(name, mask, std::bit_cast<Bits>(value), source, where)));
}

// atomics are relaxed, as on the GPU; fences before them are known only to the race checker
template <class T, class Update>
T atomic_update(T* address, Update update) {
  const std::atomic_ref<T> target(*address);
#if defined(__SANITIZE_THREAD__)
  if (block->running->fenced) __tsan_release(address);
#endif
  T old = target.load(std::memory_order_relaxed);
  while (!target.compare_exchange_weak(old, update(old), std::memory_order_relaxed)) {
  }
#if defined(__SANITIZE_THREAD__)
  if (block->running->fenced) __tsan_acquire(address);
#endif
  return old;
}

}  // namespace cushim CUSHIM_HIDDEN

// why the last launch of this thread failed; weak and not inline, so that it can be looked up in the library
extern "C" __attribute__((weak)) const char* cushim_last_message() { return cushim::last_message; }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } call{kernel, {std::forward<Arguments>(arguments)...}};
  const auto body = [](void* p) { std::apply(static_cast<Call*>(p)->kernel, static_cast<Call*>(p)->arguments); };
  return cushim::run(*config, reinterpret_cast<const void*>(kernel), body, &call);
}

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int bytes) {
  if (bytes < 0 || size_t(bytes) > cushim::kMaxSharedBytes)
    return cushim::set_error(cudaErrorInvalidValue, "cudaFuncSetAttribute: more shared memory than a GPU has");
  cushim::shared_limits()[reinterpret_cast<const void*>(kernel)] = bytes;
  return cudaSuccess;
}

inline cudaError_t cudaPeekAtLastError() { return cushim::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(cushim::last_error, cudaSuccess); }
inline const char* cudaGetErrorString(cudaError_t error) { return error ? cushim::last_message : "no error"; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t = nullptr) {
  memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t = nullptr) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  cushim::wait_for_block(where);
}
inline void __syncwarp(unsigned mask = ~0u, std::source_location where = std::source_location::current()) {
  cushim::wait_for_warp("__syncwarp", mask, 0, cushim::kVote, where);
}

template <cushim::Shuffled T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize,
              std::source_location where = std::source_location::current()) {
  const int segment = cushim::lane() / width * width;
  return cushim::shuffle("__shfl_sync", mask, value, segment + (source & (width - 1)), width, where);
}
template <cushim::Shuffled T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize,
                  std::source_location where = std::source_location::current()) {
  return cushim::shuffle("__shfl_xor_sync", mask, value, cushim::lane() ^ bits, width, where);
}
template <cushim::Shuffled T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = warpSize,
                   std::source_location where = std::source_location::current()) {
  return cushim::shuffle("__shfl_down_sync", mask, value, cushim::lane() + int(distance), width, where);
}
template <cushim::Shuffled T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = warpSize,
                 std::source_location where = std::source_location::current()) {
  return cushim::shuffle("__shfl_up_sync", mask, value, cushim::lane() - int(distance), width, where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate,
                              std::source_location where = std::source_location::current()) {
  return unsigned(cushim::wait_for_warp("__ballot_sync", mask, predicate != 0, cushim::kVote, where));
}
inline int __any_sync(unsigned mask, int predicate, std::source_location where = std::source_location::current()) {
  return cushim::wait_for_warp("__any_sync", mask, predicate != 0, cushim::kVote, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, std::source_location where = std::source_location::current()) {
  // nobody objects, so that lanes which have returned do not count
  return cushim::wait_for_warp("__all_sync", mask, predicate == 0, cushim::kVote, where) == 0;
}

inline void __threadfence() { cushim::block->running->fenced = true; }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }

// the types that CUDA has them for, no more
template <cushim::OneOf<int, unsigned, unsigned long long, float, double> T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return cushim::atomic_update(address, [=](T old) { return old + value; });
}
template <cushim::OneOf<int, unsigned> T>
T atomicSub(T* address, std::type_identity_t<T> value) {
  return cushim::atomic_update(address, [=](T old) { return old - value; });
}
template <cushim::OneOf<int, unsigned, long long, unsigned long long> T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return cushim::atomic_update(address, [=](T old) { return std::min(old, value); });
}
template <cushim::OneOf<int, unsigned, long long, unsigned long long> T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return cushim::atomic_update(address, [=](T old) { return std::max(old, value); });
}
template <cushim::OneOf<int, unsigned, unsigned long long, float> T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return cushim::atomic_update(address, [=](T) { return value; });
}
template <cushim::OneOf<int, unsigned, unsigned long long> T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return cushim::atomic_update(address, [=](T old) { return old == expected ? value : old; });
}
template <cushim::OneOf<int, unsigned, unsigned long long> T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return cushim::atomic_update(address, [=](T old) { return old | value; });
}
template <cushim::OneOf<int, unsigned, unsigned long long> T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return cushim::atomic_update(address, [=](T old) { return old & value; });
}

template <class T>
T __ldg(const T* address) {
  return *address;
}
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }

// CUDA's max and min take two integers or two floating point numbers of any kind, and prefer a number to NaN
template <class A, class B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B> && std::is_integral_v<A> == std::is_integral_v<B>)
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B> && std::is_integral_v<A> == std::is_integral_v<B>)
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  return T(b) < T(a) ? T(b) : T(a);
}
