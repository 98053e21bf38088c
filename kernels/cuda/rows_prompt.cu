// Stages of many rows that give their outputs' codes to the prompt forms of matrices at once. A block has a
// row (slices.cuh). Widths are multiples of 4. Outputs that nobody reads but as codes are not written. Bound:
// memory, and close to it issue.
#include "divide.cuh"
#include "slices.cuh"

// Blocks of a multiprocessor, of the norms and of the gates.
#ifndef NORM_BLOCKS
#define NORM_BLOCKS 6
#define MIXED_BLOCKS 4
#define GATE_BLOCKS 4
#endif
// Slices whose loads are in flight together.
#define AHEAD 4
#define HEAD 128

typedef float Quads[AHEAD][4];

// What a row of a norm is summed of: x, and delta or what is mixed, where there is one.
struct NormSum {
    float* x;            // the sum goes here too
    const float* delta;
    float* mixed;        // where the mix goes, or none
    Mix mix;
};

// A quad of the sum, whose index in the row is below the width.
template <bool MIXED>
SHARED void summed_quad(const NormSum& in, float open, ulong row, uint at, uint width, float (&of)[4]) {
    const ulong first = row * width;
    float add[4];
    load_four(in.x + first + at, of);
    if (MIXED) {
        mix_quad<true, 4>(in.mix, row, at, width, open, add);
        if (in.mixed) store_four(in.mixed + first + at, add);
    } else if (in.delta) {
        load_four(in.delta + first + at, add);
    } else {
        return;
    }
#pragma unroll
    for (uint j = 0; j < 4; j++) of[j] = of[j] + add[j];
    store_four(in.x + first + at, of);
}

// out = (x * r) * weight, r = 1 / sqrt(sum_256(x*x)/n + eps), of the summed x, where `out` is wanted; and
// out's codes.
template <bool MIXED>
SHARED void norm_row(const NormSum& in, const float* weight, uint width, float eps, float* out,
                     const RowCodes& codes) {
    extern __shared__ __align__(16) float smem[];
    __shared__ float lanes[ROW_THREADS];
    start_next_launch();
    wait_for_launches_before();
    const uint row = blockIdx.x;
    const HeldRow held = held_row(smem, width, codes.plain.group);
    const float open = MIXED ? sigmoid_exact(in.mix.gate[row]) : 0.0f;
#pragma unroll 2
    for (uint slice = 0; slice < held.slices; slice++) {
        uint at = slice * SLICE + 4 * threadIdx.x;
        float of[4];
        if (at >= width) break;
        summed_quad<MIXED>(in, open, row, at, width, of);
        store_four(held.values + at, of);
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll 8
    for (uint at = threadIdx.x; at < width; at += 256) sum = FMA(held.values[at], held.values[at], sum);
    sum = tree_256(sum, lanes);
    float r = DIVIDE(1.0f, __fsqrt_rn(DIVIDE(sum, (float)width) + eps));
#pragma unroll 2
    for (uint slice = 0; slice < held.slices; slice++) {
        uint at = slice * SLICE + 4 * threadIdx.x;
        float of[4] = {0.0f, 0.0f, 0.0f, 0.0f}, w[4];
        if (at < width) {
            load_four(weight + at, w);
            load_four(held.values + at, of);
#pragma unroll
            for (uint j = 0; j < 4; j++) of[j] = (of[j] * r) * w[j];
            if (out) store_four(out + (ulong)row * width + at, of);
        }
        hold_quad(held, slice, of);
    }
    put_row(held, row, width, codes);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, NORM_BLOCKS)
    norm_rows_many(NormSum in, const float* weight, uint width, float eps, float* out, RowCodes codes) {
    norm_row<false>(in, weight, width, eps, out, codes);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, MIXED_BLOCKS)
    norm_mixed_many(NormSum in, const float* weight, uint width, float eps, float* out, RowCodes codes) {
    norm_row<true>(in, weight, width, eps, out, codes);
}

// AHEAD quads of a row, of slices from `slice` on; zeros beyond the row.
SHARED void load_quads(const float* row, uint slice, uint width, Quads& x) {
#pragma unroll
    for (uint i = 0; i < AHEAD; i++) {
        uint at = (slice + i) * SLICE + 4 * threadIdx.x;
        x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0.0f;
        if (at < width) load_four(row + at, x[i]);
    }
}

// f(x, y, slices) for the values x of slices of a row and y of another place, which leaves the outputs in x;
// they go to `out`, where it is wanted, and their codes.
template <class Y, class F>
SHARED void gate_row(const float* x, uint width, float* out, const RowCodes& codes, Y load_other, F f) {
    extern __shared__ __align__(16) float smem[];
    const uint row = blockIdx.x;
    const HeldRow held = held_row(smem, width, codes.plain.group);
    for (uint slice = 0; slice < held.slices; slice += AHEAD) {
        Quads of, other;
        load_quads(x + (ulong)row * width, slice, width, of);
        load_other(slice, other);
        f(of, other, held.slices - slice);
#pragma unroll
        for (uint i = 0; i < AHEAD; i++) {
            uint at = (slice + i) * SLICE + 4 * threadIdx.x;
            if (slice + i >= held.slices) break;
            if (out && at < width) store_four(out + (ulong)row * width + at, of[i]);
            hold_quad(held, slice + i, of[i]);
        }
    }
    put_row(held, row, width, codes);
}

// sum_256 of a head's squares, 128 values of which a lane has a quad. Level by level of the tree lanes keep
// half of what they have, so that one value is exchanged where four would be.
SHARED float squares_of_head(const float (&x)[4]) {
    const uint lane = threadIdx.x % 32;
    float square[4], two[2];
#pragma unroll
    for (uint j = 0; j < 4; j++) square[j] = FMA(x[j], x[j], 0.0f);
#pragma unroll
    for (uint j = 0; j < 2; j++) {
        float other = __shfl_xor_sync(EVERY_LANE, lane & 16 ? square[j] : square[j + 2], 16);
        two[j] = (lane & 16 ? square[j + 2] : square[j]) + other;
    }
    float one = lane & 8 ? two[1] : two[0];
    one = one + __shfl_xor_sync(EVERY_LANE, lane & 8 ? two[0] : two[1], 8);
#pragma unroll
    for (uint h = 4; h > 0; h >>= 1) one = one + __shfl_xor_sync(EVERY_LANE, one, h);
    one = one + __shfl_xor_sync(EVERY_LANE, one, 16);
    return one + __shfl_xor_sync(EVERY_LANE, one, 8);
}

// out = ((x * r) * weight) * silu(z) by head of 128, of which a warp has one of each slice.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, GATE_BLOCKS)
    gated_norm_many(const float* x, const float* z, const float* weight, uint width, float eps, float* out,
                    RowCodes codes) {
    start_next_launch();
    wait_for_launches_before();
    float w[4];
    load_four(weight + threadIdx.x % 32 * 4, w);
    auto gates = [&](uint slice, Quads& gate) {
        load_quads(z + (ulong)blockIdx.x * width, slice, width, gate);
    };
    gate_row(x, width, out, codes, gates, [&](Quads& of, Quads& gate, uint slices) {
        // A lane finds the root of one of the heads.
        float sum = 0.0f;
#pragma unroll
        for (uint i = 0; i < AHEAD; i++) {
            float squares = squares_of_head(of[i]);
            sum = threadIdx.x % AHEAD == i ? squares : sum;
        }
        float root = DIVIDE(1.0f, __fsqrt_rn(DIVIDE(sum, (float)HEAD) + eps));
#pragma unroll
        for (uint i = 0; i < AHEAD; i++) {
            if (i >= slices) break;
            float r = __shfl_sync(EVERY_LANE, root, i);
            silu_quad(gate[i]);
#pragma unroll
            for (uint j = 0; j < 4; j++) of[i][j] = ((of[i][j] * r) * w[j]) * gate[i][j];
        }
    });
}

// out = x * sigmoid(gate); qg holds [query, gate] per head, whose length is a multiple of 4 and divides a
// slice.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, GATE_BLOCKS)
    out_gate_many(const float* x, const float* qg, uint width, uint head_dim, float* out, RowCodes codes) {
    start_next_launch();
    wait_for_launches_before();
    // From a value to its gate; two slices of qg are one of values.
    const uint apart = (4 * threadIdx.x / head_dim + 1) * head_dim;
    auto gates = [&](uint slice, Quads& gate) {
#pragma unroll
        for (uint i = 0; i < AHEAD; i++) {
            uint at = (slice + i) * SLICE + 4 * threadIdx.x;
            gate[i][0] = gate[i][1] = gate[i][2] = gate[i][3] = 0.0f;
            if (at < width)
                load_four(qg + (ulong)blockIdx.x * 2 * width + at + (slice + i) * SLICE + apart, gate[i]);
        }
    };
    gate_row(x, width, out, codes, gates, [&](Quads& of, Quads& gate, uint slices) {
#pragma unroll
        for (uint i = 0; i < AHEAD; i++) {
            if (i >= slices) break;
            sigmoid_quad(gate[i]);
#pragma unroll
            for (uint j = 0; j < 4; j++) of[i][j] = of[i][j] * gate[i][j];
        }
    });
}

// out = silu(gate) * up.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, GATE_BLOCKS)
    swiglu_many(const float* gate, const float* up, uint width, float* out, RowCodes codes) {
    start_next_launch();
    wait_for_launches_before();
    auto ups = [&](uint slice, Quads& with) {
        load_quads(up + (ulong)blockIdx.x * width, slice, width, with);
    };
    gate_row(gate, width, out, codes, ups, [&](Quads& of, const Quads& with, uint slices) {
#pragma unroll
        for (uint i = 0; i < AHEAD; i++) {
            if (i >= slices) break;
            silu_quad(of[i]);
#pragma unroll
            for (uint j = 0; j < 4; j++) of[i][j] = of[i][j] * with[i][j];
        }
    });
}
