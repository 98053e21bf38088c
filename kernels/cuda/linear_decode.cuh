// Blocks of the decode form: few rows, every weight read once. Each warp owns one tile and one slice, whose
// copies to shared memory all start before the launch before has ended; slice sums meet in shared memory and
// are added ascending. Shared by linear.cu and experts.cu.
#pragma once
#include "linear.cuh"

// Rows of a launch: ROWS is 1 (one row), 4, 8, 16 or 32.
#define ROW_TILES ((ROWS + 7) / 8)
#define ONE_ROW (ROWS == 1)

// Codes of an input for one group length: halves [rows, cols], units and sums of codes [rows, groups].
struct InputCodes {
    const uchar* codes;
    const float* units;
    const float* sums;
};

// Rows of a block: `index` divided by `divisor` names them (null: first, first + 1, ...); `count` is at
// least 1.
struct Rows {
    const uint* index;
    uint divisor, first, count;
    SHARED uint row(uint n) const { return index ? index[n] / divisor : first + n; }
};

// Shared memory of a block, in bytes from its start: slices of the warps, codes of the rows (row `n` at n *
// row_stride; 0: rows are read where they are), units of the warps, slice sums.
struct Places {
    uint warp_bytes, rows_at, row_stride, units_at, unit_bytes, sums_at;
};

// Copies the codes of the rows next to each other, by all threads. Visible after a barrier.
SHARED void stage_rows(uchar* smem, const Places& places, const InputCodes& in, const Rows& rows, uint cols) {
    uint chunks = cols / 8;
    for (uint n = 0; n < rows.count; n++) {
        const uint4* from = (const uint4*)(in.codes + (ulong)rows.row(n) * cols * 2);
        uint4* to = (uint4*)(smem + places.rows_at + n * places.row_stride);
#pragma unroll 4
        for (uint at = threadIdx.x; at < chunks; at += blockDim.x) to[at] = from[at];
    }
}

// Units of one slice, [group][row of ROWS], by one warp. Visible after __syncwarp.
template <class S>
SHARED void stage_units(typename UnitOf<S::WIDE>::Type* to, const InputCodes& in, const Rows& rows,
                        uint slice, uint cols, uint lane) {
    uint groups = cols / S::GROUP, first = slice * S::SLICE_GROUPS;
    uint count = min(groups - first, (uint)S::SLICE_GROUPS);
    for (uint i = lane; i < S::SLICE_GROUPS * ROWS; i += 32) {
        uint group = i % S::SLICE_GROUPS, n = i / S::SLICE_GROUPS;
        if (group >= count || n >= rows.count) continue;
        ulong at = (ulong)rows.row(n) * groups + first + group;
        make_unit(in.units[at], in.sums[at], to[group * ROWS + n]);
    }
}

// Writes a warp's slice sums to [row][16 outputs].
SHARED void put_sums(float* to, const Sums<ROW_TILES, ONE_ROW>& sums, uint lane) {
    uint g = lane / 4, q = lane % 4;
    if (ONE_ROW) {
        if (q == 0) to[g] = sums.v[0][0], to[g + 8] = sums.v[0][1];
        return;
    }
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int i = 0; i < (ONE_ROW ? 2 : 4); i++)
            to[(n * 8 + 2 * q + i % 2) * 16 + g + i / 2 * 8] = sums.v[n][i];
}

// The product of one slice with staged rows, into `to` [row][16 outputs]. The warp's weights are on their
// way.
template <class S>
SHARED void slice_block(float* to, uchar* smem, const Places& places, const InputCodes& in, const Rows& rows,
                        uint slice, uint cols, uint warp, uint lane) {
    typedef typename UnitOf<S::WIDE>::Type U;
    U* units = (U*)(smem + places.units_at + warp * places.unit_bytes);
    stage_units<S>(units, in, rows, slice, cols, lane);
    const uchar* b[ROW_TILES];
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
        uint row = min(n * 8 + lane / 4, rows.count - 1);
        b[n] = (places.row_stride ? smem + places.rows_at + row * places.row_stride
                                  : in.codes + (ulong)rows.row(row) * cols * 2) +
               slice * 2048;
    }
    __syncwarp();
    Sums<ROW_TILES, ONE_ROW> sums;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int i = 0; i < (ONE_ROW ? 2 : 4); i++) sums.v[n][i] = 0.0f;
    multiply_slice<S, ROW_TILES, ONE_ROW>(sums, smem + warp * places.warp_bytes,
                                          min(cols / 32 - slice * 32, 32u), b, units, lane);
    put_sums(to, sums, lane);
}

// Total of an output and row: slice sums added ascending from +0. `parts` [slice][row of ROWS][16].
SHARED float add_slices(const float* parts, uint slices, uint row, uint output) {
    float total = 0.0f;
    for (uint slice = 0; slice < slices; slice++) total = total + parts[(slice * ROWS + row) * 16 + output];
    return total;
}

// ---- Dense: an f32 fma dot over 64 lanes, lane = k mod 64, then the halving tree (docs/arithmetic.md).

// Eight consecutive weights from column k on; zeros beyond the end. VECTOR: columns are a multiple of 8.
template <int DTYPE, bool VECTOR>
SHARED void load_weights(float w[8], const uchar* row, uint k, uint cols) {
    if (!VECTOR || k >= cols) {
        for (int i = 0; i < 8; i++) {
            float value = 0.0f;
            if (k + i < cols) {
                if (DTYPE == 2)
                    value = ((const float*)row)[k + i];
                else {
                    ushort bits = ((const ushort*)row)[k + i];
                    value = DTYPE == 1 ? half_to_float(bits) : bf16_to_float(bits);
                }
            }
            w[i] = value;
        }
    } else if (DTYPE == 2) {
        float4 a = *(const float4*)(row + k * 4), b = *(const float4*)(row + k * 4 + 16);
        w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    } else {
        uint4 v = *(const uint4*)(row + k * 2);
        uint words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = stored_float<DTYPE>(words[i / 2], i % 2);
    }
}

// R rows by one output; 8 threads of a warp (t = 0..7) share the output and all get the results.
template <int DTYPE, int R, bool VECTOR>
SHARED void dense_dots(float out[R], const uchar* weights, const float* const* x, uint cols, uint t) {
    float lanes[R][8];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int i = 0; i < 8; i++) lanes[r][i] = 0.0f;
    uint end = (cols + 63) / 64 * 64;
#pragma unroll 4
    for (uint k = 8 * t; k < end; k += 64) {
        float w[8];
        load_weights<DTYPE, VECTOR>(w, weights, k, cols);
#pragma unroll
        for (int r = 0; r < R; r++) {
            float v[8];
            load_weights<2, VECTOR>(v, (const uchar*)x[r], k, cols);
#pragma unroll
            for (int i = 0; i < 8; i++) lanes[r][i] = FMA(w[i], v[i], lanes[r][i]);
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int h = 4; h > 0; h /= 2)
#pragma unroll
            for (int i = 0; i < 8; i++)
                lanes[r][i] = lanes[r][i] + __shfl_xor_sync(0xffffffffu, lanes[r][i], h);
#pragma unroll
        for (int h = 4; h > 0; h /= 2)
#pragma unroll
            for (int i = 0; i < h; i++) lanes[r][i] = lanes[r][i] + lanes[r][i + h];
        out[r] = lanes[r][0];
    }
}

// One output of a dense matrix for rows index(0..count) of x, [row][cols]; `put(n, value)` on one of 8
// threads. All 32 lanes of a warp call it together; `output` may lie beyond the last one.
template <int DTYPE, class Put>
SHARED void dense_output(const uchar* weights, uint output, uint outputs, const float* x, uint cols,
                         const Rows& rows, uint lane, Put put) {
    const int R = ONE_ROW ? 1 : 4;
    uint t = lane % 8;
    const uchar* w = weights + (ulong)min(output, outputs - 1) * cols * (DTYPE == 2 ? 4 : 2);
    for (uint first = 0; first < rows.count; first += R) {
        const float* from[R];
        float out[R];
#pragma unroll
        for (int r = 0; r < R; r++) from[r] = x + (ulong)rows.row(min(first + r, rows.count - 1)) * cols;
        if (cols % 8 == 0)
            dense_dots<DTYPE, R, true>(out, w, from, cols, t);
        else
            dense_dots<DTYPE, R, false>(out, w, from, cols, t);
        if (t == 0 && output < outputs)
#pragma unroll
            for (int r = 0; r < R; r++)
                if (first + r < rows.count) put(first + r, out[r]);
    }
}
