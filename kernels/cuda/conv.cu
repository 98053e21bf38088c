// The stage `conv`, see conv.cuh; conv_prompt.cu has long windows of which a delta rule follows.
#include "conv.cuh"

// The block's channels, to `out`.
template <int AHEAD>
SHARED void conv_channels(const StepTables& step, const DeltaPool& pool, const float* x, const float* taps,
                          float* out, uint first, uint count, bool advance) {
    const uint channel = blockIdx.x * blockDim.x + threadIdx.x, c = channels_of(pool);
    const uint at = step.windows[blockIdx.z].first;
    if (channel >= c) return;
    conv_rows<CONV_TAPS, AHEAD>(step, pool, x, taps, channel, first, count, advance,
                                [&](uint row, float value) { out[(ulong)(at + row) * c + channel] = value; });
}

// Small windows: grid [channel blocks, 1, windows]. Every thread takes all rows of its window, then advances.
extern "C" __global__ void __launch_bounds__(256)
    conv_window(StepTables step, DeltaPool pool, const float* x, const float* taps, float* out) {
    start_next_launch();
    conv_channels<4>(step, pool, x, taps, out, 0, 0x7fffffffu, true);
}

// Long windows: grid [channel blocks, chunks of `chunk` rows, windows]; conv_advance follows. The next launch
// starts when this one ends: its waiting blocks would take from this one's.
extern "C" __global__ void __launch_bounds__(256)
    conv_chunk(StepTables step, DeltaPool pool, const float* x, const float* taps, float* out, uint chunk) {
    conv_channels<8>(step, pool, x, taps, out, blockIdx.y * chunk, chunk, false);
}

// Grid [channel blocks, 1, windows].
extern "C" __global__ void __launch_bounds__(256)
    conv_advance(StepTables step, DeltaPool pool, const float* x) {
    start_next_launch();
    wait_for_launches_before();
    uint channel = blockIdx.x * blockDim.x + threadIdx.x, c = channels_of(pool);
    const StepWindow window = step.windows[blockIdx.z];
    if (channel >= c || !window.commit) return;
    float* state = pool.conv + (ulong)window.place * (CONV_TAPS - 1) * c;
    Held<CONV_TAPS> held;
    conv_load<CONV_TAPS>(held, c, channel, state);
    conv_shift<CONV_TAPS>(held, window, x, c, channel, state);
}
