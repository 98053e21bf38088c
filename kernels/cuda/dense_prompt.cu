// linear, prompt form of wide dense matrices: an f32 fma dot over 64 lanes, lane = k mod 64, then the halving
// tree (docs/arithmetic.md, dense matrix).
//
// A tile of 64 rows by 64 outputs would need 64 accumulators an output. So the lanes are taken in eight
// passes: pass c has the lanes c + 8 j, j = 0..7, which eight neighbouring threads hold, each 8 rows by 16
// outputs. At its end the first three levels of the tree (32, 16, 8) run between those threads; the passes
// come in the order 0 4 2 6 1 5 3 7, in which the other levels add neighbours. Both operands are put in the
// order of the passes before (arrange_*), so that a pass reads one stream. Bound: fused multiply-adds (128 a
// clock and multiprocessor); 6 shared loads of 16 bytes for 128 of them.
#include "common.cuh"

// How weights are stored: 0 bf16, 1 f16, 2 f32.
#ifndef DENSE_DTYPE
#define DENSE_DTYPE 0
#endif

#define SIDE 64
#define LANES 8
// Values of one step of a tile: 64 rows or outputs by the 8 lanes of a pass.
#define SLAB (SIDE * LANES)
// Slabs that are copied together, and such stages: as much as shared memory holds.
#ifndef STAGE_SLABS
#define STAGE_SLABS 16
#endif
#ifndef STAGES
#define STAGES 2
#endif
#define THREADS 256

SHARED uint pass_lane(uint pass) { return (pass & 1) * 4 + (pass & 2) + (pass >> 2); }

// Where quad q (four rows or outputs) of lane j lies in a slab: the eight lanes that are read together lie in
// different banks.
SHARED uint row_quad(uint q, uint j) { return q ^ j; }
SHARED uint output_quad(uint q, uint j) { return q ^ (j & 4); }

// [tile][pass][step][lane][64] of a matrix [count, cols], zeros beyond both. Grid [steps, tiles], 256
// threads.
template <bool ROWS, class Load>
SHARED void arrange(float* to, uint count, uint cols, const Load& load) {
    __shared__ float held[SIDE][SIDE + 1];
    uint step = blockIdx.x, steps = gridDim.x, first = blockIdx.y * SIDE;
    uint k = threadIdx.x % 64, column = step * 64 + k;
#pragma unroll 4
    for (uint r = threadIdx.x / 64; r < SIDE; r += THREADS / 64)
        held[r][k] = column < cols && first + r < count ? load((ulong)(first + r) * cols + column) : 0.0f;
    __syncthreads();
    float* tile = to + (ulong)blockIdx.y * 8 * steps * SLAB;
#pragma unroll 4
    for (uint i = threadIdx.x; i < 8 * SLAB; i += THREADS) {
        uint pass = i / SLAB, j = i % SLAB / SIDE, place = i % SIDE / 4;
        uint q = ROWS ? row_quad(place, j) : output_quad(place, j);
        tile[((ulong)pass * steps + step) * SLAB + i % SLAB] = held[4 * q + i % 4][pass_lane(pass) + 8 * j];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    arrange_rows(const float* x, float* to, uint count, uint cols) {
    wait_for_launches_before();
    arrange<true>(to, count, cols, [&](ulong at) { return x[at]; });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    arrange_outputs(const uchar* weights, float* to, uint count, uint cols) {
    wait_for_launches_before();
    arrange<false>(to, count, cols, [&](ulong at) {
#if DENSE_DTYPE == 2
        return ((const float*)weights)[at];
#elif DENSE_DTYPE == 1
        return half_to_float(((const ushort*)weights)[at]);
#else
        return bf16_to_float(((const ushort*)weights)[at]);
#endif
    });
}

SHARED void copy_async_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint)__cvta_generic_to_shared(to)),
                 "l"(from)
                 : "memory");
}

// Slabs of the stages; one more each, which is read ahead and not used.
struct DenseRoom {
    float x[STAGES][(STAGE_SLABS + 1) * SLAB];
    float w[STAGES][(STAGE_SLABS + 1) * SLAB];
    // Sums of passes that wait for their neighbours.
    float sums[3][16][THREADS];
};

// What a thread reads of a slab: its rows and outputs, the half (quarter) it keeps in the tree first.
struct Operands {
    float x[8], w[16];
};

// Where they lie in the slabs of a stage.
struct Places {
    const float *x[2], *w[4];
};

SHARED Places places_of(const float* x, const float* w, uint j, uint row_group, uint output_group) {
    Places places;
#pragma unroll
    for (uint i = 0; i < 2; i++) places.x[i] = x + j * SIDE + 4 * row_quad(2 * row_group + (i ^ j / 4), j);
#pragma unroll
    for (uint i = 0; i < 4; i++)
        places.w[i] = w + j * SIDE + 4 * output_quad(4 * output_group + (i ^ j % 4), j);
    return places;
}

// Reads a slab and goes on to the next.
SHARED void load_operands(Operands& to, Places& places) {
#pragma unroll
    for (uint i = 0; i < 2; i++) {
        *(float4*)(to.x + 4 * i) = *(const float4*)places.x[i];
        places.x[i] += SLAB;
    }
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        *(float4*)(to.w + 4 * i) = *(const float4*)places.w[i];
        places.w[i] += SLAB;
    }
}

SHARED void add_products(float (&acc)[8][16], const Operands& of) {
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int o = 0; o < 16; o++) acc[r][o] = FMA(of.w[o], of.x[r], acc[r][o]);
}

// Levels 32, 16 and 8 of the tree: each thread keeps four rows by four outputs, in acc[0..3][0..3].
SHARED void reduce_pass(float (&acc)[8][16]) {
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int o = 0; o < 16; o++) acc[r][o] = acc[r][o] + __shfl_xor_sync(0xffffffffu, acc[r + 4][o], 4);
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int o = 0; o < 8; o++) acc[r][o] = acc[r][o] + __shfl_xor_sync(0xffffffffu, acc[r][o + 8], 2);
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int o = 0; o < 4; o++) acc[r][o] = acc[r][o] + __shfl_xor_sync(0xffffffffu, acc[r][o + 4], 1);
}

// Joins the reduced sums of pass `pass` with those of complete neighbours before, as many as its number ends in
// ones. Unless it is the last one they wait in `held`, and acc begins anew.
SHARED void join_passes(float (&acc)[8][16], float (*held)[16][THREADS], uint pass, bool last) {
    uint t = threadIdx.x, waiting = __popc(pass);
    for (uint ones = pass; ones & 1; ones >>= 1) {
        waiting--;
#pragma unroll
        for (int i = 0; i < 16; i++) acc[i / 4][i % 4] = held[waiting][i][t] + acc[i / 4][i % 4];
    }
    if (last) return;
#pragma unroll
    for (int i = 0; i < 16; i++) held[waiting][i][t] = acc[i / 4][i % 4];
#pragma unroll
    for (int i = 0; i < 128; i++) acc[i / 16][i % 16] = 0.0f;
}

// Writes the thread's four rows by four outputs, as far as they are there, to out [rows, outputs].
SHARED void write_sums(float* out, const float (&acc)[8][16], uint row, uint output, uint rows,
                       uint outputs) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (row + r >= rows) break;
        float* to = out + (ulong)(row + r) * outputs + output;
#pragma unroll
        for (int o = 0; o < 4; o++)
            if (output + o < outputs) to[o] = acc[r][o];
    }
}

// Grid [tiles of 64 outputs, tiles of 64 rows, parts]: each part has 8 / parts passes, that is one subtree,
// and writes its sums to out [parts, rows, outputs].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dense_prompt(const float* x, const float* w, float* out, uint rows, uint outputs, uint steps) {
    extern __shared__ __align__(16) uchar memory[];
    DenseRoom& room = *(DenseRoom*)memory;
    wait_for_launches_before();
    uint t = threadIdx.x, j = t % 8, warp = t / 32;
    uint row_group = warp / 2 * 2 + t / 16 % 2, output_group = warp % 2 * 2 + t / 8 % 2;
    uint slabs = 8 / gridDim.z * steps;
    x += ((ulong)blockIdx.y * 8 * steps + blockIdx.z * slabs) * SLAB;
    w += ((ulong)blockIdx.x * 8 * steps + blockIdx.z * slabs) * SLAB;
    auto stage = [&](uint at) {
        uint first = at * STAGE_SLABS * SLAB, end = slabs * SLAB;
#pragma unroll
        for (uint i = 4 * t; i < STAGE_SLABS * SLAB; i += 4 * THREADS)
            if (first + i < end) {
                copy_async_16(room.x[at % STAGES] + i, x + first + i);
                copy_async_16(room.w[at % STAGES] + i, w + first + i);
            }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float acc[8][16];
#pragma unroll
    for (int i = 0; i < 128; i++) acc[i / 16][i % 16] = 0.0f;
#pragma unroll
    for (uint at = 0; at + 1 < STAGES; at++) stage(at);
    uint step = 0, pass = 0;
    for (uint at = 0; at * STAGE_SLABS < slabs; at++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        stage(at + STAGES - 1);
        uint count = min((uint)STAGE_SLABS, slabs - at * STAGE_SLABS);
        Places places = places_of(room.x[at % STAGES], room.w[at % STAGES], j, row_group, output_group);
        Operands next;
        load_operands(next, places);
        for (uint slab = 0; slab < count;) {
            // Up to the end of the pass.
            uint end = min(count, slab + steps - step);
            step += end - slab;
#pragma unroll 4
            for (; slab < end; slab++) {
                Operands now = next;
                load_operands(next, places);
                add_products(acc, now);
            }
            if (step < steps) continue;
            step = 0;
            reduce_pass(acc);
            join_passes(acc, room.sums, pass, (pass + 1) * steps >= slabs);
            pass++;
        }
    }
    uint row = blockIdx.y * SIDE + 8 * row_group + 4 * (j / 4);
    uint output = blockIdx.x * SIDE + 16 * output_group + 4 * (j % 4);
    write_sums(out + (ulong)blockIdx.z * rows * outputs, acc, row, output, rows, outputs);
}

// The levels of the tree above `parts` (2, 4 or 8) subtrees of `count` values each. Grid: blocks of 256
// values.
extern "C" __global__ void __launch_bounds__(THREADS)
    join_parts(const float* from, float* out, uint parts, ulong count) {
    wait_for_launches_before();
    ulong at = (ulong)blockIdx.x * THREADS + threadIdx.x;
    if (at >= count) return;
    float sums[8];
#pragma unroll
    for (uint part = 0; part < 8; part++) sums[part] = part < parts ? from[part * count + at] : 0.0f;
#pragma unroll
    for (int width = 1; width < 8; width *= 2)
        if (width < parts)
#pragma unroll
            for (int i = 0; i < 8; i += 2 * width) sums[i] = sums[i] + sums[i + width];
    out[at] = sums[0];
}
