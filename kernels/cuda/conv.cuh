// Causal depthwise convolution and silu (crates/device/src/cpu/conv.rs). A thread has one channel.
#pragma once
#include "divide.cuh"
#include "states.cuh"

// Taps of the convolution, a constant of the compilation.
#ifndef CONV_TAPS
#define CONV_TAPS 4
#endif

// The output of `row` of a tree: inputs under the taps from its ancestors, then from the state.
template <int TAPS>
SHARED float conv_output(const StepTables& step, const StepWindow& window, uint row, const float* x, uint c,
                         uint channel, const float* taps, const float* state) {
    float input[TAPS];
    int at = (int)row;
    int missing = 0;
#pragma unroll
    for (int back = 0; back < TAPS; back++) {
        if (at >= 0) {
            input[TAPS - 1 - back] = x[(ulong)(window.first + at) * c + channel];
            at = step.rows[window.first + at].parent;
        } else {
            missing++;
            input[TAPS - 1 - back] = state[(ulong)(TAPS - 1 - missing) * c + channel];
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TAPS; i++) sum = FMA(taps[i], input[i], sum);
    return silu_exact(sum);
}

// The state of a channel, oldest first.
template <int TAPS>
struct Held {
    float at[TAPS];  // TAPS - 1 of them

    // Input of row `row` of the window, or of the state before it.
    SHARED float input(const StepWindow& window, const float* x, uint c, uint channel, int row) const {
        float held = 0.0f;
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++)
            if (row == i - (TAPS - 1)) held = at[i];
        return row >= 0 ? x[(ulong)(window.first + row) * c + channel] : held;
    }
};

template <int TAPS>
SHARED void conv_load(Held<TAPS>& held, uint c, uint channel, const float* state) {
#pragma unroll
    for (int i = 0; i < TAPS - 1; i++) held.at[i] = state[(ulong)i * c + channel];
}

// Shifts the state by the window's rows.
template <int TAPS>
SHARED void conv_shift(const Held<TAPS>& held, const StepWindow& window, const float* x, uint c, uint channel,
                       float* state) {
    float next[TAPS];
#pragma unroll
    for (int i = 0; i < TAPS - 1; i++)
        next[i] = held.input(window, x, c, channel, (int)window.rows - (TAPS - 1) + i);
#pragma unroll
    for (int i = 0; i < TAPS - 1; i++) state[(ulong)i * c + channel] = next[i];
}

// put(row, output) for rows first .. end - 1 of a chain: the inputs slide through registers, AHEAD of them, a
// multiple of 4, are asked for together.
template <int TAPS, int AHEAD, class F>
SHARED void conv_chain(const StepWindow& window, const float* x, uint c, uint channel,
                       const float (&tap)[TAPS], const Held<TAPS>& held, uint first, uint end, F put) {
    const float* from = x + (ulong)(window.first + first) * c + channel;
    float input[TAPS - 1 + AHEAD];
#pragma unroll
    for (int i = 0; i < TAPS - 1; i++)
        input[i] = held.input(window, x, c, channel, (int)first - (TAPS - 1) + i);
    for (uint row = first; row < end; row += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++, from += c)
            input[TAPS - 1 + i] = row + i < end ? __ldg(from) : 0.0f;
#pragma unroll
        for (int i = 0; i < AHEAD; i += 4) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int t = 0; t < TAPS; t++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[j] = FMA(tap[t], input[i + j + t], sum[j]);
            silu_quad(sum);
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (row + i + j < end) put(row + i + j, sum[j]);
        }
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) input[i] = input[AHEAD + i];
    }
}

// put(row, output) for the channel's rows first .. first + count - 1 of the block's window, as far as it has
// them.
template <int TAPS, int AHEAD, class F>
SHARED void conv_rows(const StepTables& step, const DeltaPool& pool, const float* x, const float* taps,
                      uint channel, uint first, uint count, bool advance, F put) {
    const uint c = channels_of(pool);
    const StepWindow window = step.windows[blockIdx.z];
    float* state = pool.conv + (ulong)window.place * (TAPS - 1) * c;
    float tap[TAPS];
#pragma unroll
    for (int i = 0; i < TAPS; i++) tap[i] = taps[(ulong)channel * TAPS + i];
    // States change before the launches of a step only.
    Held<TAPS> held = {};
    if (first < TAPS) conv_load<TAPS>(held, c, channel, state);
    wait_for_launches_before();
    uint end = min(first + count, window.rows);
    if (window.tree) {
        for (uint row = first; row < end; row++)
            put(row, conv_output<TAPS>(step, window, row, x, c, channel, tap, state));
    } else if (first < end) {
        conv_chain<TAPS, AHEAD>(window, x, c, channel, tap, held, first, end, put);
    }
    for (uint row = first; !window.commit && row < end; row++)
        kept_row(pool, window.place, row).conv[channel] = x[(ulong)(window.first + row) * c + channel];
    if (advance && window.commit) conv_shift<TAPS>(held, window, x, c, channel, state);
}
