// Row stages of the vision tower (crates/device/src/cpu/vision.rs): LayerNorm, biases, GELU, rotation in two
// dimensions. Bound by memory: each moves its rows once.
#include "step.cuh"

// Values a thread of the elementwise kernels takes.
#define VALUES 4

SHARED ulong value_at(uint i) { return ((ulong)blockIdx.x * VALUES + i) * blockDim.x + threadIdx.x; }

// to[i] = from[i]. Grid: blocks of 1024 values, 256 threads; so for the next two.
extern "C" __global__ void __launch_bounds__(256) copy_span(const float* from, float* to, ulong count) {
    wait_for_launches_before();
#pragma unroll
    for (uint i = 0; i < VALUES; i++)
        if (value_at(i) < count) to[value_at(i)] = from[value_at(i)];
}

// x = act(x + bias). ACT: 0 none, 1 GELU by tanh, 2 GELU by erf.
template <int ACT>
SHARED void add_and_activate(float* x, const float* bias, uint width, ulong count) {
    wait_for_launches_before();
#pragma unroll
    for (uint i = 0; i < VALUES; i++) {
        ulong at = value_at(i);
        if (at >= count) continue;
        float sum = x[at] + bias[at % width];
        x[at] = ACT == 1 ? gelu_tanh(sum) : ACT == 2 ? gelu_erf(sum) : sum;
    }
}

extern "C" __global__ void __launch_bounds__(256) bias(float* x, const float* bias, uint width, ulong count) {
    add_and_activate<0>(x, bias, width, count);
}
extern "C" __global__ void __launch_bounds__(256)
    bias_gelu_tanh(float* x, const float* bias, uint width, ulong count) {
    add_and_activate<1>(x, bias, width, count);
}
extern "C" __global__ void __launch_bounds__(256)
    bias_gelu_erf(float* x, const float* bias, uint width, ulong count) {
    add_and_activate<2>(x, bias, width, count);
}

// x += delta + bias.
extern "C" __global__ void __launch_bounds__(256)
    add_bias(float* x, const float* delta, const float* bias, uint width, ulong count) {
    wait_for_launches_before();
#pragma unroll
    for (uint i = 0; i < VALUES; i++) {
        ulong at = value_at(i);
        if (at < count) x[at] = x[at] + (delta[at] + bias[at % width]);
    }
}

// One block of 256 threads a row: mean = sum_256(x)/n, d = x - mean, var = sum_256(d*d)/n, out = fma(d * (1/sqrt(var +
// eps)), weight, bias).
extern "C" __global__ void __launch_bounds__(256)
    layer_norm(const float* x, const float* weight, const float* bias, uint width, float eps, float* out) {
    __shared__ float lanes[256];
    wait_for_launches_before();
    const float* row = x + (ulong)blockIdx.x * width;
    uint t = threadIdx.x, end = (width + 255) / 256 * 256;
    float sum = 0.0f;
    for (uint at = t; at < end; at += 256) sum = sum + (at < width ? row[at] : 0.0f);
    float mean = DIVIDE(tree_256(sum, lanes), (float)width);
    float squares = 0.0f;
    for (uint at = t; at < end; at += 256) {
        float d = at < width ? row[at] - mean : 0.0f;
        squares = FMA(d, d, squares);
    }
    float variance = DIVIDE(tree_256(squares, lanes), (float)width);
    float r = DIVIDE(1.0f, __fsqrt_rn(variance + eps));
    for (uint at = t; at < width; at += 256)
        out[(ulong)blockIdx.x * width + at] = FMA((row[at] - mean) * r, weight[at], bias[at]);
}

// Rotary tables [positions, half] and the axis of each frequency; by value.
struct Rotary {
    const float* cosines;
    const float* sines;
    const uchar* axes;
    uint half_dims;
    uint positions;
};

// qkv + bias [rows, 3, heads, head_dim]: q and k heads turned whole, entry j with entry j + half; then parted. Grid
// [rows, 3], 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    rope_2d(StepTables step, Rotary rotary, const float* qkv, const float* bias, uint heads, float* q, float* k,
            float* v) {
    wait_for_launches_before();
    uint half_dims = rotary.half_dims, part = blockIdx.y, pairs = heads * half_dims, width = 2 * pairs;
    ulong row = blockIdx.x;
    const float* from = qkv + (row * 3 + part) * width;
    const float* add = bias + part * width;
    float* to = (part == 0 ? q : part == 1 ? k : v) + row * width;
    for (uint i = threadIdx.x; i < pairs; i += 256) {
        uint j = i % half_dims, low = i / half_dims * 2 * half_dims + j, high = low + half_dims;
        float x_j = from[low] + add[low], x_k = from[high] + add[high];
        if (part < 2) {
            ulong at = (ulong)step.rows[row].position[rotary.axes[j]] * half_dims + j;
            float cosine = rotary.cosines[at], sine = rotary.sines[at];
            float turned = FMA(x_j, cosine, -(x_k * sine));
            x_k = FMA(x_k, cosine, x_j * sine);
            x_j = turned;
        }
        to[low] = x_j;
        to[high] = x_k;
    }
}
