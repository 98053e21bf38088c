// Where the states of delta-net layers lie (crates/device/src/cuda/state.rs has the host's half).
//
// A recurrent state is cut into units of 4 value columns of a head; a unit holds what one warp keeps in
// registers while it walks tokens. Lane 4 l + j of the warp has column j of the unit and the key indices l +
// 8 c + 16 m, value 2 m + c, c = 0, 1: two lanes of the sum over the key index. In memory a unit is
// [quads][32 lanes][4 values]. A convolution state is [taps - 1, C], oldest row first.
#pragma once
#include "step.cuh"

// Shape of a layer and its memory; a kernel takes it by value.
struct DeltaPool {
    float* recurrent;  // [places, units, quads, 32, 4]
    float* conv;       // [places, taps - 1, C]
    float* const*
        kept;  // per place: inputs of its last uncommitted window, see kept_row; null if it never had one
    uint key_heads, value_heads, key_dim, value_dim, taps;
};

SHARED uint channels_of(const DeltaPool& pool) {
    return 2 * pool.key_heads * pool.key_dim + pool.value_heads * pool.value_dim;
}

// Units of a head: groups of 4 columns, the last one padded.
SHARED uint units_of(const DeltaPool& pool) { return (pool.value_dim + 3) / 4; }

// Groups of 16 key indices rounded up to a power of two: values a lane has of each of its two sum lanes.
SHARED uint steps_of(const DeltaPool& pool) {
    uint groups = (pool.key_dim + 15) / 16;
    return groups <= 1 ? 1 : 1u << (32 - __clz((int)groups - 1));
}

// Float4 rows of a unit.
SHARED uint quads_of(const DeltaPool& pool) { return (2 * steps_of(pool) + 3) / 4; }

// The unit `unit` of head `head` at `place`.
SHARED float* unit_at(const DeltaPool& pool, uint place, uint head, uint unit) {
    ulong at = ((ulong)place * pool.value_heads + head) * units_of(pool) + unit;
    return pool.recurrent + at * quads_of(pool) * 128;
}

// Kept inputs of one row: conv inputs [C], normalized keys [Hk, Dk], values [Hv, Dv], decays [Hv], betas
// [Hv].
struct KeptRow {
    float* conv;
    float* keys;
    float* values;
    float* gates;
};

SHARED KeptRow kept_row(const DeltaPool& pool, uint place, uint row) {
    uint c = channels_of(pool), keys = pool.key_heads * pool.key_dim,
         values = pool.value_heads * pool.value_dim;
    float* base = pool.kept[place] + (ulong)row * (c + keys + values + 2 * pool.value_heads);
    return KeptRow{base, base + c, base + c + keys, base + c + keys + values};
}
