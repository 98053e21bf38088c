// Stages that work row by row. Layout: f32 rows, row-major. Launch shapes: elementwise kernels take four values a
// thread, blockIdx.y is the row; norms take one block of 256 threads a row (or head), for sum_256 has 256 lanes.
// Bound: these kernels move a few KB a row and are bound by launch latency in decode, by memory in prompts.
#include "quads.cuh"
#include "quantize.cuh"

SHARED uint quad_at() { return 4 * (blockIdx.x * blockDim.x + threadIdx.x); }

// Codes of a quad, where codes are asked for. All lanes of a warp call it.
SHARED void emit_codes(const float* x, uint row, uint at, uint width, const Codes& codes) {
    if (codes.codes) quantize_quad(x, row, at, width, codes);
}

extern "C" __global__ void copy_values(float* to, const float* from, uint count) {
    wait_for_launches_before();
    start_next_launch();
    uint at = quad_at();
    for (uint i = at; i < at + 4 && i < count; i++) to[i] = from[i];
}

extern "C" __global__ void quantize_rows(const float* x, uint width, Codes codes) {
    wait_for_launches_before();
    start_next_launch();
    float quad[4];
    load_quad(x + (ulong)blockIdx.y * width, quad_at(), width, quad);
    quantize_quad(quad, blockIdx.y, quad_at(), width, codes);
}

extern "C" __global__ void combine_rows(Mix mix, float* out, uint width) {
    wait_for_launches_before();
    start_next_launch();
    ulong row = blockIdx.y;
    float sum[4], open = sigmoid_exact(mix.gate[row]);
    mix_quad<false, 8>(mix, row, quad_at(), width, open, sum);
    store_quad(out + row * width, quad_at(), width, sum);
}

// The quad of x that is normed: delta = combine(mix) where there is a mix; x += delta where there is a delta.
template <bool VECTOR>
SHARED void summed_quad(float* x, float* delta, const Mix& mix, ulong row, uint at, uint width, float* quad) {
    float add[4];
    ulong first = row * width;
    if (VECTOR)
        load_four(x + first + at, quad);
    else
        load_quad(x + first, at, width, quad);
    if (!delta) return;
    if (mix.routed) {
        mix_quad<VECTOR, 8>(mix, row, at, width, sigmoid_exact(mix.gate[row]), add);
        store_quad(delta + first, at, width, add);
    } else if (VECTOR) {
        load_four(delta + first + at, add);
    } else {
        load_quad(delta + first, at, width, add);
    }
    for (uint i = 0; i < 4; i++) quad[i] = quad[i] + add[i];
    store_quad(x + first, at, width, quad);
}

// One block a row. out = (x * r) * weight, r = 1 / sqrt(sum_256(x*x)/n + eps), of the summed x; and out's codes. The
// row lies in shared memory, so that all threads load and the first 256 sum.
SHARED void norm_row(float* x, float* delta, const Mix& mix, const float* weight, uint width, float eps, float* out,
                     const Codes& codes) {
    extern __shared__ __align__(16) float held[];
    __shared__ float lanes[256];
    float w[4], quad[4];
    // The next launch asks for its weights meanwhile.
    start_next_launch();
    load_quad(weight, 4 * threadIdx.x, width, w);
    wait_for_launches_before();
    ulong row = blockIdx.x, first = row * width;
    const uint stride = 4 * blockDim.x, end = (width + stride - 1) / stride * stride;
    for (uint at = 4 * threadIdx.x; at < width; at += stride) {
        if (width % 4 == 0)
            summed_quad<true>(x, delta, mix, row, at, width, quad);
        else
            summed_quad<false>(x, delta, mix, row, at, width, quad);
        *(float4*)(held + at) = make_float4(quad[0], quad[1], quad[2], quad[3]);
    }
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < 256)
#pragma unroll 8
        for (uint at = threadIdx.x; at < width; at += 256) sum = FMA(held[at], held[at], sum);
    sum = tree_256(sum, lanes);
    float r = DIVIDE(1.0f, __fsqrt_rn(DIVIDE(sum, (float)width) + eps));
    for (uint at = 4 * threadIdx.x; at < end; at += stride) {
        if (at >= stride) load_quad(weight, at, width, w);
        for (uint i = 0; i < 4; i++) quad[i] = at < width ? (held[at + i] * r) * w[i] : 0.0f;
        store_quad(out + first, at, width, quad);
        emit_codes(quad, blockIdx.x, at, width, codes);
    }
}

// 512 threads, whose loads are in flight together: for few rows (rows_prompt.cu has the other form).
extern "C" __global__ void __launch_bounds__(512) norm_rows(float* x, float* delta, Mix mix, const float* weight,
                                                            uint width, float eps, float* out, Codes codes) {
    norm_row(x, delta, mix, weight, width, eps, out, codes);
}

// Per head: x = ((x * r) * weight) * silu(z), and the codes of the row. blockIdx.x counts heads of a row, blockIdx.y
// rows. Codes are asked for only where a head holds whole groups.
extern "C" __global__ void __launch_bounds__(128) gated_norm_heads(float* x, const float* z, const float* weight,
                                                                   uint width, float eps, Codes codes) {
    __shared__ float lanes[256];
    wait_for_launches_before();
    start_next_launch();
    uint row_width = gridDim.x * width, base = blockIdx.x * width;
    float* head = x + (ulong)blockIdx.y * row_width + base;
    const float* gate = z + (ulong)blockIdx.y * row_width + base;
    // 256 lanes of the sum, two a thread.
    float low = 0.0f, high = 0.0f;
    for (uint at = threadIdx.x; at < width; at += 256) {
        low = FMA(head[at], head[at], low);
        if (at + 128 < width) high = FMA(head[at + 128], head[at + 128], high);
    }
    lanes[threadIdx.x] = low + high;
    __syncthreads();
    for (uint h = 64; h > 0; h >>= 1) {
        if (threadIdx.x < h) lanes[threadIdx.x] = lanes[threadIdx.x] + lanes[threadIdx.x + h];
        __syncthreads();
    }
    float r = DIVIDE(1.0f, __fsqrt_rn(DIVIDE(lanes[0], (float)width) + eps));
    uint end = (width + 511) / 512 * 512;
    for (uint at = 4 * threadIdx.x; at < end; at += 512) {
        float quad[4], w[4], g[4];
        load_quad(head, at, width, quad);
        load_quad(weight, at, width, w);
        load_quad(gate, at, width, g);
        for (uint i = 0; i < 4; i++) quad[i] = ((quad[i] * r) * w[i]) * silu_exact(g[i]);
        store_quad(head, at, width, quad);
        if (codes.codes) quantize_quad(quad, blockIdx.y, at < width ? base + at : row_width, row_width, codes);
    }
}

// x *= sigmoid(gate); qg holds [query, gate] per head.
extern "C" __global__ void out_gate_rows(float* x, const float* qg, uint width, uint head_dim, Codes codes) {
    wait_for_launches_before();
    start_next_launch();
    uint at = quad_at();
    float* row = x + (ulong)blockIdx.y * width;
    const float* gates = qg + (ulong)blockIdx.y * 2 * width;
    float quad[4], gate[4];
    load_quad(row, at, width, quad);
    if (head_dim % 4 == 0) {
        // A quad lies in one head.
        load_quad(gates, at + (at / head_dim + 1) * head_dim, 2 * width, gate);
    } else {
        for (uint i = 0; i < 4; i++) {
            uint j = at + i;
            gate[i] = j < width ? gates[(j / head_dim * 2 + 1) * head_dim + j % head_dim] : 0.0f;
        }
    }
    for (uint i = 0; i < 4; i++) quad[i] = quad[i] * sigmoid_exact(gate[i]);
    store_quad(row, at, width, quad);
    emit_codes(quad, blockIdx.y, at, width, codes);
}

// out = silu(gate) * up.
extern "C" __global__ void swiglu_rows(const float* gate, const float* up, float* out, uint width, Codes codes) {
    wait_for_launches_before();
    start_next_launch();
    uint at = quad_at();
    ulong first = (ulong)blockIdx.y * width;
    float g[4], u[4];
    load_quad(gate + first, at, width, g);
    load_quad(up + first, at, width, u);
    for (uint i = 0; i < 4; i++) g[i] = silu_exact(g[i]) * u[i];
    store_quad(out + first, at, width, g);
    emit_codes(g, blockIdx.y, at, width, codes);
}

// out[r] = [a[r], b[r]].
extern "C" __global__ void join_rows(const float* a, uint a_width, const float* b, uint b_width, float* out) {
    wait_for_launches_before();
    start_next_launch();
    uint at = quad_at(), width = a_width + b_width;
    for (uint i = at; i < at + 4 && i < width; i++) {
        ulong r = blockIdx.y;
        out[r * width + i] = i < a_width ? a[r * a_width + i] : b[r * b_width + (i - a_width)];
    }
}

// out[to[i]] = x[from[i]]; without `to`, out[i].
extern "C" __global__ void gather_rows(const float* x, uint width, const uint* from, const uint* to, float* out) {
    wait_for_launches_before();
    start_next_launch();
    float quad[4];
    load_quad(x + (ulong)from[blockIdx.y] * width, quad_at(), width, quad);
    store_quad(out + (ulong)(to ? to[blockIdx.y] : blockIdx.y) * width, quad_at(), width, quad);
}
