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

// What a lane's values are multiplied by: loaded before they are needed.
struct Factors {
    float weight[HEAD_VALUES], cosine[HEAD_VALUES], sine[HEAD_VALUES];
};

SHARED void load_factors(Factors& to, const float* weight, uint head_dim, const Rotary& rotary,
                         const StepRow& row) {
    uint lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < HEAD_VALUES; i++) {
        uint dim = lane + 32 * i;
        to.weight[i] = dim < head_dim ? weight[dim] : 0.0f;
        to.cosine[i] = to.sine[i] = 0.0f;
        if (dim >= 2 * rotary.half_dims) continue;
        uint j = dim < rotary.half_dims ? dim : dim - rotary.half_dims;
        ulong at = (ulong)row.position[rotary.axes[j]] * rotary.half_dims + j;
        to.cosine[i] = rotary.cosines[at];
        to.sine[i] = rotary.sines[at];
    }
}

// Norms a head and turns entry j with entry j + half. `room`: 256 floats of this warp.
SHARED void norm_and_turn(float (&x)[HEAD_VALUES], const Factors& factors, const HeadShape& shape,
                          uint half_dims, float* room) {
    uint lane = threadIdx.x % 32;
    float mean = DIVIDE(sum_squares_256(x), (float)shape.head_dim);
    float r = DIVIDE(1.0f, __fsqrt_rn(mean + shape.eps));
#pragma unroll
    for (int i = 0; i < HEAD_VALUES; i++) {
        uint dim = lane + 32 * i;
        if (dim < shape.head_dim) x[i] = (x[i] * r) * factors.weight[i];
        if (dim < 2 * half_dims) room[dim] = x[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < HEAD_VALUES; i++) {
        uint dim = lane + 32 * i;
        if (dim >= 2 * half_dims) continue;
        bool low = dim < half_dims;
        float other = room[low ? dim + half_dims : dim - half_dims];
        x[i] = low ? FMA(x[i], factors.cosine[i], -(other * factors.sine[i]))
                   : FMA(x[i], factors.cosine[i], other * factors.sine[i]);
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
    Factors factors;
    if (head < shape.heads) {
        ulong at = (ulong)blockIdx.x * shape.heads + head;
        load_head(x, qg + at * 2 * dim, dim);
        load_factors(factors, q_weight, dim, rotary, row);
        norm_and_turn(x, factors, shape, rotary.half_dims, rooms[threadIdx.x / 32]);
        store_head(x, q + at * dim, dim);
        store_digits(x, digits, at, dim);
        return;
    }
    uint kv_head = (head - shape.heads) % shape.kv_heads;
    bool is_value = head >= shape.heads + shape.kv_heads;
    ulong at = ((ulong)blockIdx.x * shape.kv_heads + kv_head) * dim;
    load_head(x, (is_value ? v : k) + at, dim);
    if (!is_value) {
        load_factors(factors, k_weight, dim, rotary, row);
        norm_and_turn(x, factors, shape, rotary.half_dims, rooms[threadIdx.x / 32]);
        store_head(x, k + at, dim);
    }
    if (!v) return;
    KvBlock block = kv_block(pool, page_of(step, step.windows[row.window], row.storage), kv_head);
    if (is_value)
        store_value(x, pool, block, row.storage % KEYS);
    else
        store_key(x, pool, block, row.storage % KEYS);
}
