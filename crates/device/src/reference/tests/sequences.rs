//! Stages with a past: convolution, delta rule and attention, in chunks, trees and company.

use super::{Noise, begin, check, contents, filled, same_bits, vector, window};
use crate::{
    AttentionShape, Buffer, DeltaShape, DeltaState, Device, KvForm, KvPool, KvShape, Row, StatePool, Step,
    VectorRef, Window, reference::Reference,
};

const DELTA: DeltaShape = DeltaShape { key_heads: 2, value_heads: 4, key_dim: 6, value_dim: 5, conv_taps: 4 };
const ATTENTION: AttentionShape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 10 };
const ROWS_MAX: usize = 192;

/// Widths of one token's inputs: m (before the convolution), a, b, q, k, v.
fn widths() -> [usize; 6] {
    let kv = ATTENTION.kv_heads * ATTENTION.head_dim;
    [DELTA.channels(), DELTA.value_heads, DELTA.value_heads, ATTENTION.heads * ATTENTION.head_dim, kv, kv]
}

type Token = [Vec<f64>; 6];

fn tokens(seed: u64, count: usize) -> Vec<Token> {
    let mut noise = Noise(seed);
    (0..count).map(|_| widths().map(|width| noise.values(width))).collect()
}

/// A delta-net layer and an attention layer side by side, without weights between them.
struct Layers {
    device: Reference,
    inputs: [Buffer; 6],
    mixed: Buffer,
    outputs: [Buffer; 2],
    taps: VectorRef,
    decay: VectorRef,
    dt_bias: VectorRef,
    states: StatePool,
    kv: KvPool,
}

const TAPS: f64 = 0.7;

impl Layers {
    fn new(threads: usize) -> Self {
        let mut device = Reference::new(threads);
        let inputs = widths().map(|width| device.buffer(ROWS_MAX, width).expect("memory"));
        let mixed = device.buffer(ROWS_MAX, DELTA.channels()).expect("memory");
        let delta_width = DELTA.value_heads * DELTA.value_dim;
        let outputs = [delta_width, widths()[3]].map(|width| device.buffer(ROWS_MAX, width).expect("memory"));
        let taps: Vec<f64> = Noise(11).values(DELTA.channels() * 4).iter().map(|x| x * TAPS).collect();
        let (taps, decay) = (vector(&mut device, &taps), vector(&mut device, &[0.3, 0.1, 1.0, 0.02]));
        let dt_bias = vector(&mut device, &[0.5, -0.5, 0.1, 2.0]);
        let states = device.state_pool(DELTA, 3).expect("memory");
        let shape = KvShape { pages: 6, kv_heads: 2, head_dim: 10, form: KvForm::Int8 };
        let kv = device.kv_pool(shape).expect("memory");
        Self { device, inputs, mixed, outputs, taps, decay, dt_bias, states, kv }
    }

    /// Runs both layers; each row's delta and attention outputs, joined.
    fn run(&mut self, windows: Vec<Window>, rows: &[Token]) -> Vec<Vec<f64>> {
        let device = &mut self.device;
        begin(device, windows);
        for (at, &buffer) in self.inputs.iter().enumerate() {
            let values: Vec<f64> = rows.iter().flat_map(|row| row[at].iter().copied()).collect();
            device.write(buffer, 0, &values).expect("fits");
        }
        let [m, a, b, q, k, v] = self.inputs;
        let [delta, attended] = self.outputs;
        device.conv(m, self.taps, self.states, self.mixed).expect("fits");
        device.delta_rule(self.mixed, a, b, self.decay, self.dt_bias, self.states, delta).expect("fits");
        device.kv_append(k, v, self.kv).expect("fits");
        device.attention(q, ATTENTION, self.kv, attended).expect("fits");
        let delta_width = DELTA.value_heads * DELTA.value_dim;
        let delta = contents(device, delta, rows.len(), delta_width);
        let attended = contents(device, attended, rows.len(), widths()[3]);
        let parts = delta.chunks(delta_width).zip(attended.chunks(widths()[3]));
        parts.map(|(delta, attended)| [delta, attended].concat()).collect()
    }

    /// A prompt in committed chunks of up to `chunk` rows.
    fn prompt(&mut self, tokens: &[Token], chunk: usize) -> Vec<Vec<f64>> {
        let mut out = Vec::new();
        for (at, tokens) in tokens.chunks(chunk).enumerate() {
            out.extend(self.run(vec![window(at * chunk, tokens.len())], tokens));
        }
        out
    }

    fn state(&mut self, place: u32) -> DeltaState {
        self.device.state_read(self.states, place).expect("exists")
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// q, k `[T, Hk Dk]` normalized, v `[T, Hv Dv]`, after convolution, written term by term.
fn naive_mixed(tokens: &[Token]) -> Vec<[Vec<f64>; 3]> {
    let taps: Vec<f64> = Noise(11).values(DELTA.channels() * 4).iter().map(|x| x * TAPS).collect();
    let at = |t: usize, c: usize| {
        let past = (0..4).filter(|i| t + i >= 3).map(|i| taps[c * 4 + i] * tokens[t + i - 3][0][c]);
        silu(past.sum())
    };
    let normalized = |x: Vec<f64>, scale: f64| -> Vec<f64> {
        let norm = |head: &[f64]| (head.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        x.chunks(6).flat_map(|head| head.iter().map(move |x| x / norm(head) * scale)).collect()
    };
    let row = |t| {
        let all: Vec<f64> = (0..DELTA.channels()).map(|c| at(t, c)).collect();
        let (q, k) =
            (normalized(all[..12].to_vec(), 1.0 / 6f64.sqrt()), normalized(all[12..24].to_vec(), 1.0));
        [q, k, all[24..].to_vec()]
    };
    (0..tokens.len()).map(row).collect()
}

/// The chunked form of `docs/model.md` section 4 over all tokens at once, from an empty state, for one value
/// head.
fn naive_delta(tokens: &[Token], head: usize) -> Vec<Vec<f64>> {
    let (decay, bias) = ([0.3, 0.1, 1.0, 0.02][head], [0.5, -0.5, 0.1, 2.0][head]);
    let mixed = naive_mixed(tokens);
    let key = head / 2 * 6;
    let dot = |x: &[f64], y: &[f64]| -> f64 { (key..key + 6).map(|i| x[i] * y[i]).sum() };
    let mut cumulative = 0.0;
    let (mut log_decay, mut learned) = (Vec::new(), Vec::<Vec<f64>>::new());
    let mut out = Vec::new();
    for (t, [q, k, v]) in mixed.iter().enumerate() {
        cumulative -= decay * (tokens[t][1][head] + bias).exp().ln_1p();
        log_decay.push(cumulative);
        let beta = 1.0 / (1.0 + (-tokens[t][2][head]).exp());
        let mut u: Vec<f64> = v[head * 5..][..5].to_vec();
        for j in 0..t {
            let by = dot(k, &mixed[j][1]) * (cumulative - log_decay[j]).exp();
            u.iter_mut().zip(&learned[j]).for_each(|(u, past)| *u -= by * past);
        }
        u.iter_mut().for_each(|u| *u *= beta);
        learned.push(u);
        let mut o = vec![0.0; 5];
        for j in 0..=t {
            let by = dot(q, &mixed[j][1]) * (cumulative - log_decay[j]).exp();
            o.iter_mut().zip(&learned[j]).for_each(|(o, u)| *o += by * u);
        }
        out.push(o);
    }
    out
}

fn naive_attention(tokens: &[Token], head: usize) -> Vec<Vec<f64>> {
    let (query, key) = (head * 10, head / 2 * 10);
    let row = |t: usize| {
        let score = |j: &Token| -> f64 {
            (0..10).map(|i| tokens[t][3][query + i] * j[4][key + i]).sum::<f64>() / 10f64.sqrt()
        };
        let exps: Vec<f64> = tokens[..=t].iter().map(|j| score(j).exp()).collect();
        let sum: f64 = exps.iter().sum();
        (0..10).map(|i| (0..=t).map(|j| exps[j] * tokens[j][5][key + i]).sum::<f64>() / sum).collect()
    };
    (0..tokens.len()).map(row).collect()
}

#[test]
fn layers_agree_with_naive_forms_and_with_themselves_in_chunks() {
    let tokens = tokens(21, 180);
    let whole = Layers::new(1).prompt(&tokens, 180);
    for head in 0..4 {
        let delta: Vec<f64> = whole.iter().flat_map(|row| row[head * 5..][..5].to_vec()).collect();
        check("delta rule", &delta, &naive_delta(&tokens, head).concat(), 1e-12);
        let attended: Vec<f64> = whole.iter().flat_map(|row| row[20 + head * 10..][..10].to_vec()).collect();
        check("attention", &attended, &naive_attention(&tokens, head).concat(), 1e-13);
    }
    let mut first = Layers::new(1);
    first.prompt(&tokens, 180);
    for (threads, chunk) in [(3, 180), (1, 1), (2, 64), (1, 7)] {
        let mut layers = Layers::new(threads);
        same_bits("chunks", &layers.prompt(&tokens, chunk).concat(), &whole.concat());
        assert_eq!(layers.state(0), first.state(0));
    }
}

#[test]
fn trees_score_and_keep_as_serial_steps_do() {
    let prompt = tokens(22, 70);
    let nodes = tokens(23, 8);
    // 0 - 1 - 4 - 6; 0 - 2 - 5; 3 - 7 from the committed state.
    let parents = [None, Some(0), Some(0), None, Some(1), Some(2), Some(4), Some(3)];
    let paths: [&[usize]; 4] = [&[0, 1, 4, 6], &[0, 2, 5], &[3, 7], &[]];
    for path in paths {
        let mut tree = Layers::new(2);
        tree.prompt(&prompt, 33);
        let before = tree.state(0);
        let drafted = Window { parents: Some(parents.to_vec()), commit: false, ..window(70, 8) };
        let scored = tree.run(vec![drafted], &nodes);
        assert_eq!(tree.state(0), before, "an uncommitted window leaves the state");
        tree.device.state_keep(tree.states, 0, path).expect("a path");
        let (kv, start) = (tree.kv, 70);
        tree.device.kv_keep(kv, &[2, 0, 1], start, path).expect("a path");

        let mut serial = Layers::new(1);
        serial.prompt(&prompt, 70);
        for (depth, &node) in path.iter().enumerate() {
            let row = serial.run(vec![window(70 + depth, 1)], &nodes[node..=node]);
            same_bits("a row of the tree", &scored[node], &row[0]);
        }
        assert_eq!(tree.state(0), serial.state(0));
        let next = tokens(24, 3);
        let from = 70 + path.len();
        let after = tree.run(vec![window(from, 3)], &next);
        same_bits("after keeping", &after.concat(), &serial.run(vec![window(from, 3)], &next).concat());
    }
}

#[test]
fn chains_can_be_kept_in_part_and_only_along_a_path() {
    let (prompt, drafts) = (tokens(25, 5), tokens(26, 4));
    let draft = || Window { commit: false, ..window(5, 4) };
    let mut layers = Layers::new(1);
    layers.prompt(&prompt, 5);
    let scored = layers.run(vec![draft()], &drafts);
    let refusal = layers.device.state_keep(layers.states, 0, &[0, 2]).expect_err("not a path");
    assert_eq!(refusal.to_string(), "state_keep: row 2 does not follow row Some(0) of the window");
    layers.device.state_keep(layers.states, 0, &[0]).expect_err("the window is gone after a keep");
    layers.run(vec![draft()], &drafts);
    layers.device.state_keep(layers.states, 0, &[0, 1]).expect("a path");
    let mut serial = Layers::new(1);
    let all = serial.prompt(&[&prompt[..], &drafts].concat(), 9);
    same_bits("drafts", &scored.concat(), &all[5..].concat());
    let mut short = Layers::new(1);
    short.prompt(&[&prompt[..], &drafts[..2]].concat(), 7);
    assert_eq!(layers.state(0), short.state(0));
}

#[test]
fn sequences_in_company_do_not_see_each_other() {
    let (ours, theirs) = (tokens(27, 40), tokens(28, 20));
    let solo = Layers::new(1).prompt(&ours, 40);
    let mut layers = Layers::new(2);
    let mut bad = theirs.clone();
    bad[3][0][1] = f64::NAN;
    bad[3][4][1] = f64::exp2(41.0);
    let windows = |start: usize| {
        let other = Window { place: 1, pages: vec![5, 4], first: 0, rows: 10, ..window(start / 2, 10) };
        vec![other, Window { first: 10, ..window(start, 20) }]
    };
    let mut got = Vec::new();
    for half in 0..2 {
        let rows = [&bad[half * 10..][..10], &ours[half * 20..][..20]].concat();
        let out = layers.run(windows(half * 20), &rows);
        // The fault reaches what sees it, and nothing before.
        let faulted: Vec<bool> = out[..10].iter().map(|row| row.iter().any(|x| x.is_nan())).collect();
        let expected: Vec<bool> = (half * 10..half * 10 + 10).map(|t| t >= 3).collect();
        assert_eq!(faulted, expected);
        got.extend(out[10..].iter().cloned());
    }
    same_bits("in company", &got.concat(), &solo.concat());
}

#[test]
fn states_and_pages_travel() {
    let (prompt, next) = (tokens(29, 70), tokens(30, 2));
    let mut layers = Layers::new(1);
    layers.prompt(&prompt, 70);
    layers.device.state_copy(layers.states, 0, 2).expect("exists");
    let expected = layers.run(vec![window(70, 2)], &next);

    let mut fresh = Layers::new(1);
    let saved = layers.device.state_read(layers.states, 2).expect("exists");
    fresh.device.state_write(fresh.states, 0, &saved).expect("fits");
    for (from, to) in [(2, 3), (0, 1)] {
        let bytes = layers.device.kv_export(layers.kv, from).expect("exists");
        fresh.device.kv_import(fresh.kv, to, &bytes).expect("fits");
    }
    let moved = Window { pages: vec![3, 1], ..window(70, 2) };
    same_bits("resumed", &fresh.run(vec![moved], &next).concat(), &expected.concat());

    layers.device.state_clear(layers.states, 2).expect("exists");
    let cleared = layers.state(2);
    assert!(cleared.recurrent.iter().chain(&cleared.conv).all(|&x| x == 0.0));
    let unwritten = layers.device.kv_export(layers.kv, 5).expect("exists");
    assert!(unwritten.iter().all(|&byte| byte == 0));
    layers.device.kv_import(layers.kv, 5, &unwritten[1..]).expect_err("too short");
}

#[test]
fn queries_and_keys_are_normed_and_turned() {
    let mut device = Reference::new(1);
    let mut noise = Noise(31);
    let (qg, k) = (noise.values(2 * 80), noise.values(2 * 20));
    let (q_weight, k_weight) = (noise.values(10), noise.values(10));
    let (cos, sin) = crate::host_math::rotary_table(50, 1e4, 6);
    let table = device.rotary(&cos, &sin, &[0, 2, 1]).expect("valid");
    let (qg_rows, k_rows) = (filled(&mut device, 80, &qg), filled(&mut device, 20, &k));
    let weights = [vector(&mut device, &q_weight), vector(&mut device, &k_weight)];
    let q_rows = filled(&mut device, 40, &[0.0; 80]);
    let positions = [[1, 2, 3], [49, 0, 7]];
    let mut turn = |positions: [[u32; 3]; 2]| {
        let rows = positions.map(|position| Row { token: None, position }).to_vec();
        device.begin(&Step::new(rows, vec![window(0, 2)]).expect("fits")).expect("begins");
        device.qk_norm_rope(qg_rows, k_rows, weights[0], weights[1], 1e-6, table, ATTENTION, q_rows)
    };
    turn(positions).expect("inside the table");
    let refusal = turn([[0; 3], [0, 50, 0]]).expect_err("outside the table");
    assert_eq!(refusal.to_string(), "qk_norm_rope: rotary position 50 does not exist, there are 50");

    let expected = |head: &[f64], weight: &[f64], position: [u32; 3]| {
        let rms = (head.iter().map(|x| x * x).sum::<f64>() / 10.0 + 1e-6).sqrt();
        let mut out: Vec<f64> = head.iter().zip(weight).map(|(x, w)| x / rms * w).collect();
        for (j, axis) in [0, 2, 1].into_iter().enumerate() {
            let (sin, cos) = (position[axis] as f64 * 1e4f64.powf(-(j as f64) / 3.0)).sin_cos();
            (out[j], out[j + 3]) = (out[j] * cos - out[j + 3] * sin, out[j + 3] * cos + out[j] * sin);
        }
        out
    };
    let heads = |x: &[f64], stride: usize, weight: &[f64]| -> Vec<f64> {
        let heads = x.len() / 2 / stride;
        let head = |(at, x): (usize, &[f64])| expected(&x[..10], weight, positions[at / heads]);
        x.chunks(stride).enumerate().flat_map(head).collect()
    };
    check("q", &contents(&mut device, q_rows, 2, 40), &heads(&qg, 20, &q_weight), 1e-14);
    check("k", &contents(&mut device, k_rows, 2, 20), &heads(&k, 10, &k_weight), 1e-14);

    let x = filled(&mut device, 40, &[1.0; 80]);
    device.out_gate(x, qg_rows, 2, ATTENTION).expect("fits");
    let gates = qg.chunks(20).flat_map(|head| head[10..].iter().map(|g| 1.0 / (1.0 + (-g).exp())));
    check("gates", &contents(&mut device, x, 2, 40), &gates.collect::<Vec<_>>(), 1e-15);
}
