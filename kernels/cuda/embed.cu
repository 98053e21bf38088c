// embed: out[row] = table[token of the step's row], docs/arithmetic.md, embedding; or that of a draw, where
// the rows have draws. Reads the packed layout of linear.cuh. Grid: rows; rows without a token are left.
#include "linear.cuh"
#include "step.cuh"

// Code of column `col` of one output.
template <int WIDTH>
SHARED uint plane_field(const uint* plane, uint lane, uint t, uint h, uint j) {
    uint p = j / 2, odd = j % 2;
    uint word = WIDTH == 4 ? 2 * t + h : WIDTH == 2 ? t : 0;
    uint field = WIDTH == 4 ? p : WIDTH == 2 ? p + 4 * h : p + 4 * h + 8 * t;
    return plane[lane * WIDTH + word] >> (16 * odd + WIDTH * field) & ((1u << WIDTH) - 1);
}

template <class S>
SHARED float embed_value(const Packed& table, uint output, uint col, uint cols) {
    uint steps = (cols + STEP - 1) / STEP, tile = output / 16, g = output % 8, h = output / 8 % 2;
    const uint* step = table.codes + ((ulong)tile * steps + col / STEP) * S::STEP_WORDS;
    uint lane = 4 * g + col % 32 / 8, t = col % STEP / 32, j = col % 8;
    const int first = S::BITS >= 4 ? 4 : 2, second = S::BITS == 8 ? 4 : S::BITS == 6 ? 2 : 1;
    uint code = plane_field<first>(step, lane, t, h, j);
    if (S::BITS > first) code |= plane_field<second>(step + 32 * first, lane, t, h, j) << first;
    uint group = col / S::GROUP;
    const uchar* at =
        table.params + ((ulong)tile * (cols / S::GROUP) + group) * S::GROUP_BYTES + g * (S::GROUP_BYTES / 8);
    float scale, bias = 0.0f;
    if (S::DTYPE == 2) {
        scale = ((const float*)at)[h];
        if (S::AFFINE) bias = ((const float*)at)[2 + h];
    } else {
        scale = stored_float<S::DTYPE>(((const ushort*)at)[h], 0);
        if (S::AFFINE) bias = stored_float<S::DTYPE>(((const ushort*)at)[2 + h], 0);
    }
    if (S::AFFINE) return FMA(scale, (float)code, bias);
    return scale * (float)((int)code - (1 << (S::BITS - 1)));
}

extern "C" __global__ void embed(Packed table, float* out, uint cols, uint outputs, StepTables step,
                                 const uint* drawn, const uint* draws) {
    wait_for_launches_before();
    start_next_launch();
    uint row = blockIdx.x;
    int token = draws ? (int)drawn[draws[row]] : step.rows[row].token;
    if (token < 0 || (uint)token >= outputs) return;
    for (uint col = threadIdx.x; col < cols; col += blockDim.x) {
        float value;
        with_kind(0, [&](auto kind) {
            typedef decltype(kind) K;
            if constexpr (K::DENSE) {
                const uchar* weights = table.params + ((ulong)token * cols + col) * (K::DTYPE == 2 ? 4 : 2);
                if (K::DTYPE == 2)
                    value = *(const float*)weights;
                else
                    value = stored_float<K::DTYPE>(*(const ushort*)weights, 0);
            } else {
                value = embed_value<typename K::Stored>(table, token, col, cols);
            }
        });
        out[(ulong)row * cols + col] = value;
    }
}
