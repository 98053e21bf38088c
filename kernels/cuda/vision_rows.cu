// Row stages of the vision tower (crates/device/src/cpu/vision.rs): LayerNorm, biases, GELU, rotation in two
// dimensions. Bound by memory: each moves its rows once.
#include "step.cuh"

// Rows of pixels, width = 3 frames area: levels[3][256] of bytes [rows][3][area], each channel's frame after
// frame. Grid [rows], 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    patch_rows(const uchar* bytes, const float* levels, float* to, uint area, uint width) {
    wait_for_launches_before();
    const uchar* row = bytes + (ulong)blockIdx.x * 3 * area;
    for (uint i = threadIdx.x; i < width; i += 256) {
        uint channel = i / (width / 3);
        to[(ulong)blockIdx.x * width + i] = levels[channel * 256 + row[channel * area + i % area]];
    }
}

// A place between four rows of a table (crates/device/src/patches.rs).
struct Between {
    uint rows[4];
    double parts[2];
};

// The table's value at each place: along rows, then down. Grid [places], 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    between_rows(const float* table, const Between* between, float* to, uint width) {
    wait_for_launches_before();
    const Between place = between[blockIdx.x];
    double down = place.parts[0], right = place.parts[1];
    for (uint i = threadIdx.x; i < width; i += 256) {
        double corner[4];
#pragma unroll
        for (uint n = 0; n < 4; n++) corner[n] = (double)table[(ulong)place.rows[n] * width + i];
        double top = corner[0] * (1.0 - right) + corner[1] * right;
        double bottom = corner[2] * (1.0 - right) + corner[3] * right;
        to[(ulong)blockIdx.x * width + i] = (float)(top * (1.0 - down) + bottom * down);
    }
}

// to[i] = from[i]. Grid: blocks of 1024 values, 256 threads.
extern "C" __global__ void __launch_bounds__(256) copy_span(const float* from, float* to, ulong count) {
    wait_for_launches_before();
    ulong at = (ulong)blockIdx.x * 1024 + threadIdx.x;
#pragma unroll
    for (uint i = 0; i < 4; i++)
        if (at + 256 * i < count) to[at + 256 * i] = from[at + 256 * i];
}

// Up to four columns of a row that lie together. Grid [blocks of 1024 columns, rows], 256 threads.
struct Quad {
    uint column, count;
    ulong at;
};

SHARED Quad quad_of(uint width) {
    uint column = 4 * (blockIdx.x * 256 + threadIdx.x);
    return Quad{column, column < width ? min(4u, width - column) : 0, (ulong)blockIdx.y * width + column};
}

SHARED void load_quad(float (&x)[4], const float* from, ulong at, uint count, bool whole) {
    if (whole) {
        *(float4*)x = *(const float4*)(from + at);
        return;
    }
#pragma unroll
    for (uint i = 0; i < 4; i++) x[i] = i < count ? from[at + i] : 0.0f;
}

SHARED void store_quad(const float (&x)[4], float* to, ulong at, uint count, bool whole) {
    if (whole) {
        *(float4*)(to + at) = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (uint i = 0; i < 4; i++)
        if (i < count) to[at + i] = x[i];
}

// x = act(x + bias). ACT: 0 none, 1 GELU by tanh, 2 GELU by erf.
template <int ACT>
SHARED void add_and_activate(float* x, const float* bias, uint width) {
    wait_for_launches_before();
    Quad quad = quad_of(width);
    if (quad.count == 0) return;
    __align__(16) float values[4], add[4];
    bool whole = width % 4 == 0;
    load_quad(values, x, quad.at, quad.count, whole);
    load_quad(add, bias, quad.column, quad.count, whole);
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        float sum = values[i] + add[i];
        values[i] = ACT == 1 ? gelu_tanh(sum) : ACT == 2 ? gelu_erf(sum) : sum;
    }
    store_quad(values, x, quad.at, quad.count, whole);
}

extern "C" __global__ void __launch_bounds__(256) bias(float* x, const float* bias, uint width) {
    add_and_activate<0>(x, bias, width);
}
extern "C" __global__ void __launch_bounds__(256) bias_gelu_tanh(float* x, const float* bias, uint width) {
    add_and_activate<1>(x, bias, width);
}
extern "C" __global__ void __launch_bounds__(256) bias_gelu_erf(float* x, const float* bias, uint width) {
    add_and_activate<2>(x, bias, width);
}

// x += delta + bias.
extern "C" __global__ void __launch_bounds__(256)
    add_bias(float* x, const float* delta, const float* bias, uint width) {
    wait_for_launches_before();
    Quad quad = quad_of(width);
    if (quad.count == 0) return;
    __align__(16) float values[4], change[4], add[4];
    bool whole = width % 4 == 0;
    load_quad(values, x, quad.at, quad.count, whole);
    load_quad(change, delta, quad.at, quad.count, whole);
    load_quad(add, bias, quad.column, quad.count, whole);
#pragma unroll
    for (uint i = 0; i < 4; i++) values[i] = values[i] + (change[i] + add[i]);
    store_quad(values, x, quad.at, quad.count, whole);
}

// lane[i] += lane[i + h], h = 128 ... 1, of the 256 lanes of a warp: lane t + 32 i is sums[i] of thread t.
// All threads get the result.
SHARED float warp_tree_256(float (&sums)[8]) {
#pragma unroll
    for (int h = 4; h > 0; h >>= 1)
#pragma unroll
        for (int i = 0; i < h; i++) sums[i] = sums[i] + sums[i + h];
    float sum = sums[0];
#pragma unroll
    for (int h = 16; h > 0; h >>= 1) sum = sum + __shfl_xor_sync(0xffffffffu, sum, h);
    return sum;
}

// A warp a row: mean = sum_256(x)/n, d = x - mean, var = sum_256(d*d)/n, out = fma(d * (1/sqrt(var + eps)),
// weight, bias). Grid: blocks of 8 rows, 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    layer_norm(const float* x, const float* weight, const float* bias, uint rows, uint width, float eps,
               float* out) {
    wait_for_launches_before();
    ulong at_row = (ulong)blockIdx.x * 8 + threadIdx.x / 32;
    if (at_row >= rows) return;
    const float* row = x + at_row * width;
    float* to = out + at_row * width;
    uint t = threadIdx.x % 32;
    float sums[8], squares[8];
#pragma unroll
    for (uint i = 0; i < 8; i++) sums[i] = squares[i] = 0.0f;
    for (uint at = t; at < width + t; at += 256)
#pragma unroll
        for (uint i = 0; i < 8; i++) sums[i] = sums[i] + (at + 32 * i < width ? row[at + 32 * i] : 0.0f);
    float mean = DIVIDE(warp_tree_256(sums), (float)width);
    for (uint at = t; at < width + t; at += 256)
#pragma unroll
        for (uint i = 0; i < 8; i++) {
            float d = at + 32 * i < width ? row[at + 32 * i] - mean : 0.0f;
            squares[i] = FMA(d, d, squares[i]);
        }
    float variance = DIVIDE(warp_tree_256(squares), (float)width);
    float r = DIVIDE(1.0f, __fsqrt_rn(variance + eps));
#pragma unroll 4
    for (uint at = t; at < width; at += 32) to[at] = FMA((row[at] - mean) * r, weight[at], bias[at]);
}

// Rotary tables [positions, half] and the axis of each frequency; by value.
struct Rotary {
    const float* cosines;
    const float* sines;
    const uchar* axes;
    uint half_dims;
    uint positions;
};

// qkv + bias [rows, 3, heads, head_dim]: q and k heads turned whole, entry j with entry j + half; then
// parted. Grid [rows, 3], 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    rope_2d(StepTables step, Rotary rotary, const float* qkv, const float* bias, uint heads, float* q,
            float* k, float* v) {
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
