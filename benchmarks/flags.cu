// Compares three ways to raise a flag in a peer's memory behind data that a copy engine has pushed there.
//
//     copy            cudaMemcpyAsync of 8 bytes behind the data
//     barrier + copy  a system-wide memory barrier on the stream (CU_STREAM_MEM_OP_BARRIER), then the 8-byte copy
//     write value     cuStreamWriteValue64, whose implicit barrier is documented; the value is fixed when it is issued
//
// Prints the time of a stream of pushes and flags, eagerly and as a CUDA graph, and the host time of one flag. Then a litmus
// test: a kernel on the peer spins on the flag and counts data words that are stale and flag words that are torn.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 -o /tmp/flags benchmarks/flags.cu -lcuda && /tmp/flags [iterations]
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                              \
    do {                                                                                         \
        const cudaError_t code = (call);                                                         \
        if (code != cudaSuccess) {                                                               \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(code)); \
            std::exit(1);                                                                        \
        }                                                                                        \
    } while (0)

enum Variant { copy_only, barrier_and_copy, write_value, no_flag, variants };
const char* const names[] = {"copy", "barrier + copy", "write value", "no flag"};

double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool barrier(cudaStream_t stream) {
    CUstreamBatchMemOpParams op{};
    op.operation = CU_STREAM_MEM_OP_BARRIER;
    op.memoryBarrier.operation = CU_STREAM_MEM_OP_BARRIER;
    op.memoryBarrier.flags = CU_STREAM_MEMORY_BARRIER_TYPE_SYS;
    const CUresult code = cuStreamBatchMemOp(stream, 1, &op, 0);
    if (code != CUDA_SUCCESS) std::printf("cuStreamBatchMemOp: %d\n", static_cast<int>(code));
    return code == CUDA_SUCCESS;
}

// Raises `flag` to the value at `source`, or to `value`, which is the same.
bool raise(Variant variant, uint64_t* flag, const uint64_t* source, uint64_t value, cudaStream_t stream) {
    if (variant == no_flag) return true;
    if (variant == write_value) {
        const CUresult code = cuStreamWriteValue64(stream, reinterpret_cast<CUdeviceptr>(flag), value, 0);
        if (code != CUDA_SUCCESS) std::printf("cuStreamWriteValue64: %d\n", static_cast<int>(code));
        return code == CUDA_SUCCESS;
    }
    if (variant == barrier_and_copy && !barrier(stream)) return false;
    CHECK(cudaMemcpyAsync(flag, source, sizeof(uint64_t), cudaMemcpyDeviceToDevice, stream));
    return true;
}

__device__ uint64_t load_acquire(const uint64_t* p) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
__device__ uint64_t timer() {
    uint64_t value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

struct Counts {
    unsigned long long stale, torn, late;
};

// Waits for flag number i = 1.. and checks the data behind it. A flag is (i << 32 | ~i); the data are words of i.
__global__ void check_kernel(const uint64_t* flag, const uint32_t* data, int words, int iterations, volatile int* ack,
                             Counts* counts) {
    __shared__ int go;
    for (int i = 1; i <= iterations; ++i) {
        if (threadIdx.x == 0) {
            const uint64_t expected = static_cast<uint64_t>(i) << 32 | static_cast<uint32_t>(~i), begin = timer();
            const uint64_t previous = static_cast<uint64_t>(i - 1) << 32 | static_cast<uint32_t>(i == 1 ? 0 : ~(i - 1));
            go = 1;
            for (uint64_t seen = 0; (seen = load_acquire(flag)) != expected;) {
                if (seen != previous) ++counts->torn;
                if (timer() - begin > 5000000000ull) {
                    ++counts->late, go = 0;
                    break;
                }
            }
        }
        __syncthreads();
        if (!go) return;
        unsigned long long stale = 0;
        for (int w = words - 1 - static_cast<int>(threadIdx.x); w >= 0; w -= blockDim.x) {
            uint32_t word;  // the last words first
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(data + w) : "memory");
            stale += word != static_cast<uint32_t>(i);
        }
        if (stale) atomicAdd(&counts->stale, stale);
        __syncthreads();
        if (threadIdx.x == 0) *ack = i;
    }
}

__global__ void fill_kernel(uint32_t* data, int words, uint32_t value, uint64_t* source, uint64_t flag) {
    for (int w = blockIdx.x * blockDim.x + threadIdx.x; w < words; w += gridDim.x * blockDim.x) data[w] = value;
    if (blockIdx.x == 0 && threadIdx.x == 0) *source = flag;
}

struct Buffers {
    char *from, *to;
    uint64_t *source, *flag;
    cudaStream_t stream;
};

bool issue(Variant variant, const Buffers& b, size_t bytes, int pieces) {
    for (int p = 0; p < pieces; ++p) {
        CHECK(cudaMemcpyAsync(b.to + p * bytes, b.from + p * bytes, bytes, cudaMemcpyDeviceToDevice, b.stream));
        if (!raise(variant, b.flag + p, b.source, 1, b.stream)) return false;
    }
    return true;
}

struct Timing {
    double device_us, host_us;
};

Timing time_pieces(Variant variant, const Buffers& b, size_t bytes, int pieces, bool graph) {
    cudaGraph_t recorded;
    cudaGraphExec_t executable = nullptr;
    if (graph) {
        CHECK(cudaStreamBeginCapture(b.stream, cudaStreamCaptureModeThreadLocal));
        const bool issued = issue(variant, b, bytes, pieces);
        CHECK(cudaStreamEndCapture(b.stream, &recorded));
        if (!issued || cudaGraphInstantiate(&executable, recorded, 0) != cudaSuccess) return {-1, -1};
    }
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<double> device, host;
    for (int i = 0; i < 60; ++i) {
        CHECK(cudaEventRecord(begin, b.stream));
        const double before = now_us();
        if (graph) {
            CHECK(cudaGraphLaunch(executable, b.stream));
        } else if (!issue(variant, b, bytes, pieces)) {
            return {-1, -1};
        }
        host.push_back(now_us() - before);
        CHECK(cudaEventRecord(end, b.stream));
        CHECK(cudaStreamSynchronize(b.stream));
        float ms = 0;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        device.push_back(ms * 1000.0);
    }
    std::sort(device.begin(), device.end());
    std::sort(host.begin(), host.end());
    return {device[device.size() / 2], host[host.size() / 2]};
}

void litmus(Variant variant, const Buffers& b, int words, int iterations) {
    volatile int* ack;
    Counts* counts;
    CHECK(cudaHostAlloc(reinterpret_cast<void**>(const_cast<int**>(&ack)), sizeof(int),
                        cudaHostAllocPortable | cudaHostAllocMapped));
    CHECK(cudaHostAlloc(reinterpret_cast<void**>(&counts), sizeof(Counts), cudaHostAllocPortable | cudaHostAllocMapped));
    *ack = 0, *counts = Counts{};
    CHECK(cudaMemsetAsync(b.flag, 0, sizeof(uint64_t), b.stream));
    CHECK(cudaStreamSynchronize(b.stream));
    CHECK(cudaSetDevice(1));
    cudaStream_t reader;
    CHECK(cudaStreamCreateWithFlags(&reader, cudaStreamNonBlocking));
    check_kernel<<<1, 1024, 0, reader>>>(b.flag, reinterpret_cast<uint32_t*>(b.to), words, iterations, ack, counts);
    CHECK(cudaSetDevice(0));
    int done = 0;
    for (int i = 1; i <= iterations; ++i, ++done) {
        const uint64_t value = static_cast<uint64_t>(i) << 32 | static_cast<uint32_t>(~i);
        fill_kernel<<<32, 256, 0, b.stream>>>(reinterpret_cast<uint32_t*>(b.from), words, i, b.source, value);
        CHECK(cudaMemcpyAsync(b.to, b.from, words * sizeof(uint32_t), cudaMemcpyDeviceToDevice, b.stream));
        if (!raise(variant, b.flag, b.source, value, b.stream)) break;
        const double begin = now_us();
        while (*ack < i && now_us() - begin < 6e6) {
        }
        if (*ack < i) break;
    }
    CHECK(cudaSetDevice(1));
    CHECK(cudaStreamSynchronize(reader));
    CHECK(cudaSetDevice(0));
    std::printf("%-15s %9d words: %7d flags, stale words %llu, torn flags %llu, late %llu\n", names[variant], words, done,
                counts->stale, counts->torn, counts->late);
}

int main(int argc, char** argv) {
    const int iterations = argc > 1 ? std::atoi(argv[1]) : 20000;
    Buffers b{};
    const size_t bytes = 256u << 20;
    CHECK(cudaSetDevice(1));
    CHECK(cudaMalloc(reinterpret_cast<void**>(&b.to), bytes));
    CHECK(cudaMalloc(reinterpret_cast<void**>(&b.flag), 4096));
    CHECK(cudaDeviceEnablePeerAccess(0, 0));
    CHECK(cudaSetDevice(0));
    CHECK(cudaDeviceEnablePeerAccess(1, 0));
    CHECK(cudaMalloc(reinterpret_cast<void**>(&b.from), bytes));
    CHECK(cudaMalloc(reinterpret_cast<void**>(&b.source), 4096));
    CHECK(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
    std::printf("pieces x bytes      flag             eager us  host us/flag   graph us\n");
    for (const size_t piece : {size_t{4} << 10, size_t{256} << 10, size_t{1} << 20, size_t{8} << 20}) {
        const int pieces = 16;
        for (int v = variants - 1; v >= 0; --v) {
            const auto variant = static_cast<Variant>(v);
            time_pieces(variant, b, piece, pieces, false);
            const Timing eager = time_pieces(variant, b, piece, pieces, false);
            const Timing graph = time_pieces(variant, b, piece, pieces, true);
            std::printf("%2d x %9zu    %-15s %9.1f %10.2f %12.1f\n", pieces, piece, names[v], eager.device_us,
                        eager.host_us / pieces, graph.device_us);
        }
    }
    for (const int words : {256, 16384, 262144, 4194304}) {
        for (int v = 0; v < no_flag; ++v)
            litmus(static_cast<Variant>(v), b, words, words > 1000000 ? iterations / 10 : iterations);
    }
    return 0;
}
