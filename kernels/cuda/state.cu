// Clearing and copying states (crates/device/src/cuda/state.rs). The next launch may read states before it
// waits, so it starts when these end.
#include "states.cuh"

// Float4s of a place's recurrent state, and floats of its convolution state.
SHARED ulong recurrent_quads(const DeltaPool& pool) {
    return (ulong)pool.value_heads * units_of(pool) * quads_of(pool) * 32;
}

SHARED ulong conv_values(const DeltaPool& pool) { return (ulong)(pool.taps - 1) * channels_of(pool); }

// Grid of any size.
extern "C" __global__ void state_clear(DeltaPool pool, uint place) {
    wait_for_launches_before();
    ulong at = (ulong)blockIdx.x * blockDim.x + threadIdx.x, stride = (ulong)gridDim.x * blockDim.x;
    float4* recurrent = (float4*)pool.recurrent + place * recurrent_quads(pool);
    for (ulong i = at; i < recurrent_quads(pool); i += stride)
        recurrent[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float* conv = pool.conv + place * conv_values(pool);
    for (ulong i = at; i < conv_values(pool); i += stride) conv[i] = 0.0f;
}

// Grid of any size.
extern "C" __global__ void state_copy(DeltaPool pool, uint from, uint to) {
    wait_for_launches_before();
    ulong at = (ulong)blockIdx.x * blockDim.x + threadIdx.x, stride = (ulong)gridDim.x * blockDim.x;
    const float4* source = (const float4*)pool.recurrent + from * recurrent_quads(pool);
    float4* target = (float4*)pool.recurrent + to * recurrent_quads(pool);
    for (ulong i = at; i < recurrent_quads(pool); i += stride) target[i] = source[i];
    const float* source_conv = pool.conv + from * conv_values(pool);
    float* target_conv = pool.conv + to * conv_values(pool);
    for (ulong i = at; i < conv_values(pool); i += stride) target_conv[i] = source_conv[i];
}
