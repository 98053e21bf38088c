// Convolution of one long window and what delta_scan wants of its outputs: keys and queries normalized,
// values as they are, and the gates. A thread has a channel, a block whole heads; the key dimension is 16
// DELTA_STEPS. Bound: memory.
#include "conv.cuh"
#include "delta_rule.cuh"

#define THREADS 256
#define CHUNK 16
#define HEADS (THREADS / DELTA_KEY_DIM)
// Columns of lanes that read together lie in different banks.
#define HEAD_STRIDE (DELTA_KEY_DIM + 8)
#define ROW_STRIDE (HEADS * HEAD_STRIDE)

struct ConvPrompt {
    const float* x;     // [rows, C]
    const float* taps;  // [C, CONV_TAPS]
    float* mixed;       // [rows, C], of which delta_scan reads the values
    uint whole;         // whether others read keys and queries of `mixed`
};

// put(i, output) for the channel's rows first .. first + CHUNK - 1 of a long window that has all of them and
// the rows under their taps: nothing is asked for a row.
template <int TAPS, class F>
SHARED void conv_whole(const float* x, const float* taps, const StepWindow& window, uint channel, uint c,
                       uint first, F put) {
    float tap[TAPS], input[CHUNK + TAPS - 1];
#pragma unroll
    for (int i = 0; i < TAPS; i++) tap[i] = taps[(ulong)channel * TAPS + i];
    wait_for_launches_before();
    const float* from = x + (ulong)(window.first + first - (TAPS - 1)) * c + channel;
#pragma unroll
    for (int i = 0; i < CHUNK + TAPS - 1; i++) input[i] = __ldg(from + i * c);
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < TAPS; t++)
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] = FMA(tap[t], input[i + j + t], sum[j]);
        silu_quad(sum);
#pragma unroll
        for (int j = 0; j < 4; j++) put(i + j, sum[j]);
    }
}

// Normalizes the chunk's keys or queries of HEADS heads, from the first of the block's channels on.
SHARED void put_heads(const float* tile, const DeltaPool& pool, const Prepared& to, uint channel, uint row,
                      uint rows, float q_scale) {
    const uint lane = threadIdx.x % 32, head = channel / DELTA_KEY_DIM, is_key = head >= pool.key_heads;
    for (uint n = threadIdx.x / 32 * 4; n < rows * HEADS; n += THREADS / 32 * 4) {
        uint column = n + lane % 4, own = column % HEADS, at = min(column / HEADS, rows - 1);
        float values[2 * DELTA_STEPS];
        const float* from = tile + at * ROW_STRIDE + own * HEAD_STRIDE;
        load_spread<DELTA_STEPS, DELTA_KEY_DIM>(values, from, DELTA_KEY_DIM);
        l2_normalize<DELTA_STEPS>(values, is_key ? 1.0f : q_scale);
        ulong place = (ulong)(row + at) * pool.key_heads + head - is_key * pool.key_heads + own;
        if (column < rows * HEADS)
            write_spread<DELTA_STEPS>(values, to.qk + (2 * place + is_key) * DELTA_KEY_DIM, lane / 4);
    }
}

SHARED void put_gates(const DeltaPool& pool, const DeltaInputs& in, const Prepared& to, uint row, uint rows) {
    for (uint i = threadIdx.x; i < rows * pool.value_heads; i += THREADS) {
        uint at = row * pool.value_heads + i, head = i % pool.value_heads;
        Gates gates = gates_of(in.a[at], in.b[at], in.decay[head], in.dt_bias[head]);
        *(float2*)(to.gates + 2 * at) = make_float2(gates.g, gates.beta);
    }
}

// Grid [blocks of THREADS channels, of which each kind has whole ones, and one for the gates; chunks of rows;
// 1]. conv_advance follows.
extern "C" __global__ void __launch_bounds__(THREADS, 5)
    conv_prompt(StepTables step, DeltaPool pool, DeltaInputs in, Prepared to, ConvPrompt conv) {
    __shared__ float tile[CHUNK * ROW_STRIDE];
    const uint channel = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * CHUNK;
    const uint c = channels_of(pool);
    const StepWindow window = step.windows[0];
    const uint rows = min(CHUNK, window.rows - min(first, window.rows)), at = window.first + first;
    const bool heads = blockIdx.x * THREADS < 2 * pool.key_heads * pool.key_dim;
    if (blockIdx.x == gridDim.x - 1 || rows == 0) {
        wait_for_launches_before();
        return put_gates(pool, in, to, at, rows);
    }
    float* own = tile + threadIdx.x / DELTA_KEY_DIM * HEAD_STRIDE + threadIdx.x % DELTA_KEY_DIM;
    float* mixed = conv.mixed + (ulong)at * c + channel;
    auto put = [&](uint i, float value) {
        if (heads) own[i * ROW_STRIDE] = value;
        if (!heads || conv.whole) mixed[i * c] = value;
    };
    const bool plain = !window.tree && window.commit && rows == CHUNK && first >= CONV_TAPS - 1;
    if (channel < c && plain)
        conv_whole<CONV_TAPS>(conv.x, conv.taps, window, channel, c, first, put);
    else if (channel < c)
        conv_rows<CONV_TAPS, 8>(step, pool, conv.x, conv.taps, channel, first, CHUNK, false,
                                [&](uint row, float value) { put(row - first, value); });
    if (!heads) return;
    __syncthreads();
    put_heads(tile, pool, to, blockIdx.x * THREADS, at, rows, in.q_scale);
}
