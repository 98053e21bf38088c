// Norm and rotation of query and key heads (crates/device/src/cpu/rope.rs). A warp has one head.
#include "kv.cuh"

// Rotary tables [positions, half] and the axis of each frequency; by value.
struct Rotary {
    const float* cosines;
    const float* sines;
    const uchar* axes;
    uint half_dims;
    uint positions;
};

struct HeadShape {
    uint heads, kv_heads, head_dim;
    float eps;
};

// sum_256(x * x), of the lane's values x[i] = head[lane + 32 i].
SHARED float sum_squares_256(const float (&x)[HEAD_VALUES]) {
    float lane[HEAD_VALUES];
#pragma unroll
    for (int i = 0; i < HEAD_VALUES; i++) lane[i] = FMA(x[i], x[i], 0.0f);
#pragma unroll
    for (int h = HEAD_VALUES / 2; h > 0; h >>= 1)
#pragma unroll
        for (int i = 0; i < h; i++) lane[i] = lane[i] + lane[i + h];
    float sum = lane[0];
#pragma unroll
    for (int h = 16; h > 0; h >>= 1) sum = sum + __shfl_xor_sync(0xffffffffu, sum, h);
    return sum;
}

// Norms a head and turns entry j with entry j + half. `room`: 256 floats of this warp.
SHARED void norm_and_turn(float (&x)[HEAD_VALUES], const float* weight, const HeadShape& shape,
                          const Rotary& rotary, const StepRow& row, float* room) {
    uint lane = threadIdx.x % 32;
    float mean = DIVIDE(sum_squares_256(x), (float)shape.head_dim);
    float r = DIVIDE(1.0f, __fsqrt_rn(mean + shape.eps));
#pragma unroll
    for (int i = 0; i < HEAD_VALUES; i++) {
        uint dim = lane + 32 * i;
        if (dim < shape.head_dim) x[i] = (x[i] * r) * weight[dim];
        room[dim] = x[i];
    }
    __syncwarp();
    uint half_dims = rotary.half_dims;
#pragma unroll
    for (int i = 0; i < HEAD_VALUES; i++) {
        uint dim = lane + 32 * i;
        if (dim >= 2 * half_dims) continue;
        uint j = dim % half_dims;
        ulong at = (ulong)row.position[rotary.axes[j]] * half_dims + j;
        float cosine = rotary.cosines[at], sine = rotary.sines[at];
        float x_j = room[j], x_k = room[j + half_dims];
        x[i] = dim < half_dims ? FMA(x_j, cosine, -(x_k * sine)) : FMA(x_k, cosine, x_j * sine);
    }
    __syncwarp();
}

SHARED void store_head(const float (&x)[HEAD_VALUES], float* to, uint head_dim) {
#pragma unroll
    for (int i = 0; i < HEAD_VALUES; i++) {
        uint dim = threadIdx.x % 32 + 32 * i;
        if (dim < head_dim) to[dim] = x[i];
    }
}

// Query digits of a step, for attention: [rows, heads, groups of 64, high and low, 64] and units [rows,
// heads, groups].
struct Digits {
    schar* digits;
    float* units;
};

SHARED void store_digits(const float (&x)[HEAD_VALUES], const Digits& to, ulong at, uint head_dim) {
    uint groups = (head_dim + 63) / 64;
    store_query(x, to.digits + at * groups * 128, to.units + at * groups, groups);
}

// Query digits of heads that are there already. Grid [rows, blocks of 4 heads], 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    query_digits(const float* q, uint heads, uint head_dim, Digits digits) {
    start_next_launch();
    wait_for_launches_before();
    uint head = blockIdx.y * 4 + threadIdx.x / 32;
    if (head >= heads) return;
    ulong at = (ulong)blockIdx.x * heads + head;
    float x[HEAD_VALUES];
    load_head(x, q + at * head_dim, head_dim);
    store_digits(x, digits, at, head_dim);
}

// Grid [rows, blocks of 4 heads], 128 threads: query heads, then key heads. With `v` the keys and values also
// go to the pages of `pool` (kv_append in the same launch); v heads come last then.
extern "C" __global__ void __launch_bounds__(128)
    qk_norm_rope(StepTables step, HeadShape shape, Rotary rotary, const float* qg, float* k,
                 const float* q_weight, const float* k_weight, float* q, Digits digits, const float* v,
                 KvPool pool) {
    __shared__ float rooms[4][32 * HEAD_VALUES];
    start_next_launch();
    wait_for_launches_before();
    uint head = blockIdx.y * 4 + threadIdx.x / 32, dim = shape.head_dim;
    uint all = shape.heads + shape.kv_heads * (v ? 2 : 1);
    if (head >= all) return;
    const StepRow row = step.rows[blockIdx.x];
    float x[HEAD_VALUES];
    if (head < shape.heads) {
        ulong at = (ulong)blockIdx.x * shape.heads + head;
        load_head(x, qg + at * 2 * dim, dim);
        norm_and_turn(x, q_weight, shape, rotary, row, rooms[threadIdx.x / 32]);
        store_head(x, q + at * dim, dim);
        store_digits(x, digits, at, dim);
        return;
    }
    uint kv_head = (head - shape.heads) % shape.kv_heads;
    bool is_value = head >= shape.heads + shape.kv_heads;
    ulong at = ((ulong)blockIdx.x * shape.kv_heads + kv_head) * dim;
    load_head(x, (is_value ? v : k) + at, dim);
    if (!is_value) {
        norm_and_turn(x, k_weight, shape, rotary, row, rooms[threadIdx.x / 32]);
        store_head(x, k + at, dim);
    }
    if (!v) return;
    KvBlock block = kv_block(pool, page_of(step, step.windows[row.window], row.storage), kv_head);
    if (is_value)
        store_value(x, pool, block, row.storage % KEYS);
    else
        store_key(x, pool, block, row.storage % KEYS);
}
