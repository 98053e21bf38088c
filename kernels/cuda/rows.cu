// Stages that work row by row. Layout: f32 rows, row-major. Launch shapes: elementwise kernels take four values a
// thread, blockIdx.y is the row; norms take one block of 256 threads a row (or head), for sum_256 has 256 lanes.
// Bound: these kernels move a few KB a row and are bound by launch latency in decode, by memory in prompts.
#include "quantize.cuh"

// Four values of a row from `at` on (0 beyond the row).
SHARED void load_quad(const float* row, uint at, uint width, float* x) {
    if ((width & 3) == 0 && at < width) {
        float4 v = *(const float4*)(row + at);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        return;
    }
    for (uint i = 0; i < 4; i++) x[i] = at + i < width ? row[at + i] : 0.0f;
}

SHARED void store_quad(float* row, uint at, uint width, const float* x) {
    if ((width & 3) == 0 && at < width) {
        *(float4*)(row + at) = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
    for (uint i = 0; i < 4; i++)
        if (at + i < width) row[at + i] = x[i];
}

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

// x += delta where there is a delta; out = (x * r) * weight, r = 1 / sqrt(sum_256(x*x)/n + eps); and out's codes.
extern "C" __global__ void __launch_bounds__(256) norm_rows(float* x, const float* delta, const float* weight,
                                                            uint width, float eps, float* out, Codes codes) {
    __shared__ float lanes[256];
    wait_for_launches_before();
    start_next_launch();
    float* row = x + (ulong)blockIdx.x * width;
    if (delta) {
        const float* add = delta + (ulong)blockIdx.x * width;
        for (uint at = threadIdx.x; at < width; at += 256) row[at] = row[at] + add[at];
    }
    float sum = 0.0f;
    for (uint at = threadIdx.x; at < width; at += 256) sum = FMA(row[at], row[at], sum);
    sum = tree_256(sum, lanes);
    float r = DIVIDE(1.0f, __fsqrt_rn(DIVIDE(sum, (float)width) + eps));
    // The barriers above make the block's own sums visible to it.
    uint end = (width + 1023) / 1024 * 1024;
    for (uint at = 4 * threadIdx.x; at < end; at += 1024) {
        float quad[4], w[4];
        load_quad(row, at, width, quad);
        load_quad(weight, at, width, w);
        for (uint i = 0; i < 4; i++) quad[i] = (quad[i] * r) * w[i];
        store_quad(out + (ulong)blockIdx.x * width, at, width, quad);
        emit_codes(quad, blockIdx.x, at, width, codes);
    }
}

// Per head: x = ((x * r) * weight) * silu(z). blockIdx.x counts heads of all rows.
extern "C" __global__ void __launch_bounds__(256) gated_norm_heads(float* x, const float* z, const float* weight,
                                                                   uint width, float eps) {
    __shared__ float lanes[256];
    wait_for_launches_before();
    start_next_launch();
    float* head = x + (ulong)blockIdx.x * width;
    const float* gate = z + (ulong)blockIdx.x * width;
    float sum = 0.0f;
    for (uint at = threadIdx.x; at < width; at += 256) sum = FMA(head[at], head[at], sum);
    sum = tree_256(sum, lanes);
    float r = DIVIDE(1.0f, __fsqrt_rn(DIVIDE(sum, (float)width) + eps));
    for (uint at = threadIdx.x; at < width; at += 256)
        head[at] = ((head[at] * r) * weight[at]) * silu_exact(gate[at]);
}

// x *= sigmoid(gate); qg holds [query, gate] per head.
extern "C" __global__ void out_gate_rows(float* x, const float* qg, uint width, uint head_dim, Codes codes) {
    wait_for_launches_before();
    start_next_launch();
    uint at = quad_at();
    float* row = x + (ulong)blockIdx.y * width;
    const float* gates = qg + (ulong)blockIdx.y * 2 * width;
    float quad[4];
    load_quad(row, at, width, quad);
    for (uint i = 0; i < 4; i++) {
        uint j = at + i;
        if (j < width) quad[i] = quad[i] * sigmoid_exact(gates[(j / head_dim * 2 + 1) * head_dim + j % head_dim]);
    }
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

// out[r] = sum of weights[r, i] * routed[r * k + i] in rank order from +0, then + sigmoid(gate[r]) * shared[r].
extern "C" __global__ void combine_rows(const float* routed, const float* weights, uint k, const float* shared,
                                        const float* gate, float* out, uint width) {
    wait_for_launches_before();
    start_next_launch();
    uint at = quad_at();
    ulong row = blockIdx.y;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, x[4];
    for (uint i = 0; i < k; i++) {
        float weight = weights[row * k + i];
        load_quad(routed + (row * k + i) * width, at, width, x);
        for (uint j = 0; j < 4; j++) sum[j] = FMA(weight, x[j], sum[j]);
    }
    float open = sigmoid_exact(gate[row]);
    load_quad(shared + row * width, at, width, x);
    for (uint j = 0; j < 4; j++) sum[j] = FMA(open, x[j], sum[j]);
    store_quad(out + row * width, at, width, sum);
}
