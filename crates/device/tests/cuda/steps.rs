//! Time of decode steps: all layers of the family in one list, as a model queues them, so that launches
//! overlap and caches are as cold as they are there.

use device::cuda::Cuda;
use device::{
    Buffer, DeltaShape, Device, Draw, ExpertsRef, KvForm, KvPool, KvShape, MatrixRef, Picks, Rotary, Row,
    StatePool, Step, VectorRef,
};

use crate::attention::FAMILY;
use crate::layers::queue;
use crate::matrices::{MLX, large};
use crate::{Noise, time, window};

const WIDTH: usize = 2048;
const INNER: usize = 512;
const EXPERTS: usize = 256;
const PICKS: usize = 8;
const VOCABULARY: usize = 248_320;
const ROWS_MAX: usize = 32;
/// Delta-net layers before each attention layer, and how often they come: 40 layers.
const DELTA_LAYERS: usize = 3;
const TURNS: usize = 10;
const DELTA: DeltaShape =
    DeltaShape { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, conv_taps: 4 };

enum Mixer {
    /// qkv, z, a, b, out; taps, decay, dt_bias, norm of heads.
    DeltaNet([MatrixRef; 5], StatePool, [VectorRef; 4]),
    /// qg, k, v, out; norms of q and k.
    Attention([MatrixRef; 4], KvPool, [VectorRef; 2]),
}

struct Layer {
    mixer: Mixer,
    experts: ExpertsRef,
    /// Router, gate, up, scalar gate, down.
    others: [MatrixRef; 5],
    norm: VectorRef,
}

struct Network {
    layers: Vec<Layer>,
    /// How often a step goes through them.
    turns: usize,
    head: MatrixRef,
    rotary: Rotary,
    picks: Picks,
    routed: Buffer,
    logits: Buffer,
    /// What the residual begins with.
    start: Buffer,
    /// Residual, update, normed, router, gate, up, scalar gate, inner, shared.
    planes: [Buffer; 9],
    /// qkv, z, a, b, mixed, out.
    delta: [Buffer; 6],
    /// qg, k, v, q, attended.
    attention: [Buffer; 5],
    drafter: Drafter,
}

/// The layer that drafts, with the weights of an attention layer.
struct Drafter {
    /// From an embedding and a hidden state.
    join: MatrixRef,
    pool: KvPool,
    /// Hidden states of committed rows, embedding, hidden state, both, residual, result.
    planes: [Buffer; 6],
}

fn matrices<const N: usize>(device: &mut Cuda, seed: u64, shapes: [[usize; 2]; N]) -> [MatrixRef; N] {
    shapes.map(|[rows, cols]| device.matrix(&large(rows, cols, MLX, seed)).unwrap())
}

fn vectors<const N: usize>(device: &mut Cuda, lengths: [usize; N]) -> [VectorRef; N] {
    let mut noise = Noise::new(31);
    lengths.map(|n| {
        let values: Vec<f64> = noise.values(n).iter().map(|x| x.abs() + 0.1).collect();
        device.vector(&values).unwrap()
    })
}

fn kv_shape() -> KvShape {
    KvShape { pages: 4 * ROWS_MAX, kv_heads: FAMILY.kv_heads, head_dim: FAMILY.head_dim, form: KvForm::Int8 }
}

impl Layer {
    fn new(device: &mut Cuda, number: usize) -> Self {
        let (seed, channels, values) = (number as u64, DELTA.channels(), 4096);
        let mixer = match number < DELTA_LAYERS {
            true => Mixer::DeltaNet(
                matrices(
                    device,
                    seed,
                    [[channels, WIDTH], [values, WIDTH], [32, WIDTH], [32, WIDTH], [WIDTH, values]],
                ),
                device.state_pool(DELTA, ROWS_MAX).unwrap(),
                vectors(device, [4 * channels, 32, 32, 128]),
            ),
            false => Mixer::Attention(
                matrices(device, seed, [[8192, WIDTH], [512, WIDTH], [512, WIDTH], [WIDTH, 4096]]),
                device.kv_pool(kv_shape()).unwrap(),
                vectors(device, [FAMILY.head_dim; 2]),
            ),
        };
        let others = matrices(
            device,
            seed,
            [[EXPERTS, WIDTH], [INNER, WIDTH], [INNER, WIDTH], [1, WIDTH], [WIDTH, INNER]],
        );
        let one = vec![large(INNER, WIDTH, MLX, seed); EXPERTS];
        let experts = device.experts(&one, &one, &vec![large(WIDTH, INNER, MLX, seed); EXPERTS]).unwrap();
        let [norm] = vectors(device, [WIDTH]);
        Self { mixer, experts, others, norm }
    }
}

impl Network {
    fn new(device: &mut Cuda) -> Self {
        let buffers = |device: &mut Cuda, width| device.buffer(ROWS_MAX, width).unwrap();
        let planes =
            [WIDTH, WIDTH, WIDTH, EXPERTS, INNER, INNER, 1, INNER, WIDTH].map(|n| buffers(device, n));
        // So far apart that layers leave rows different, and their experts with them.
        let values: Vec<f64> = Noise::new(3).values(ROWS_MAX * WIDTH).iter().map(|x| 100.0 * x).collect();
        let start = buffers(device, WIDTH);
        device.write(start, 0, &values).unwrap();
        let (cos, sin) = (vec![1.0; 32 * 256], vec![0.0; 32 * 256]);
        Self {
            layers: (0..=DELTA_LAYERS).map(|number| Layer::new(device, number)).collect(),
            turns: TURNS,
            head: device.matrix(&large(VOCABULARY, WIDTH, MLX, 5)).unwrap(),
            rotary: device.rotary(&cos, &sin, &[0; 32]).unwrap(),
            picks: device.picks(ROWS_MAX, PICKS).unwrap(),
            routed: device.buffer(ROWS_MAX * PICKS, WIDTH).unwrap(),
            logits: buffers(device, VOCABULARY),
            start,
            planes,
            delta: [DELTA.channels(), 4096, 32, 32, DELTA.channels(), 4096].map(|n| buffers(device, n)),
            attention: [8192, 512, 512, 4096, 4096].map(|n| buffers(device, n)),
            drafter: Drafter {
                join: device.matrix(&large(WIDTH, 2 * WIDTH, MLX, 6)).unwrap(),
                pool: device.kv_pool(kv_shape()).unwrap(),
                planes: [WIDTH, WIDTH, WIDTH, 2 * WIDTH, WIDTH, WIDTH].map(|n| buffers(device, n)),
            },
        }
    }

    /// A forward of the drafting layer, of the last row's result alone: after a draw (`chained`), or from
    /// rows that are kept.
    fn draft(&self, device: &mut dyn Device, of: &Step, chained: bool) {
        let rows = of.rows().len();
        let Layer { mixer: Mixer::Attention(to, _, [q_norm, k_norm]), experts, others, norm } =
            &self.layers[DELTA_LAYERS]
        else {
            unreachable!("the last layer attends")
        };
        let ([x, update, normed, ..], [qg, k, v, q, attended]) = (self.planes, self.attention);
        let [kept, embedding, hidden, joined, residual, drafted] = self.drafter.planes;
        let (all, last): (Vec<usize>, _) = ((0..rows).collect(), [rows - 1]);
        device.begin(of).unwrap();
        match chained {
            true => device.embed_drawn(self.head, &[0], embedding).unwrap(),
            false => device.embed(self.head, embedding).unwrap(),
        }
        device.copy_rows(if chained { drafted } else { kept }, &all, hidden, &all).unwrap();
        device.norm(embedding, rows, *norm, 1e-6, normed).unwrap();
        device.norm(hidden, rows, *norm, 1e-6, update).unwrap();
        device.join(normed, update, rows, joined).unwrap();
        device.linear(joined, rows, &[(self.drafter.join, x)]).unwrap();
        device.norm(x, rows, *norm, 1e-6, normed).unwrap();
        device.linear(normed, rows, &[(to[0], qg), (to[1], k), (to[2], v)]).unwrap();
        device.qk_norm_rope(qg, k, *q_norm, *k_norm, 1e-6, self.rotary, FAMILY, q).unwrap();
        device.kv_append(k, v, self.drafter.pool).unwrap();
        device.attention(q, FAMILY, self.drafter.pool, attended).unwrap();
        device.out_gate(attended, qg, rows, FAMILY).unwrap();
        let (mut planes, mut heads) = (self.planes, attended);
        if rows > 1 {
            device.gather(attended, &last, q).unwrap();
            device.gather(x, &last, residual).unwrap();
            (planes[0], heads) = (residual, q);
        }
        planes[2] = drafted;
        device.linear(heads, 1, &[(to[3], update)]).unwrap();
        queue(device, &planes, self.routed, 1, (*norm, *experts, others, self.picks));
        device.linear(drafted, 1, &[(self.head, self.logits)]).unwrap();
    }

    /// A round of one stream, as the engine asks for it: the states of the rows accepted before are kept,
    /// three tokens drafted, and a window of four rows verified.
    fn round(&self, device: &mut dyn Device, pools: &[StatePool], accepted: &[usize]) {
        for &pool in pools {
            device.state_keep(pool, 0, accepted).unwrap();
        }
        let draw = [crate::draw::plain(0, VOCABULARY as u32)];
        for position in 0..3 {
            let rows = if position == 0 { accepted.len() } else { 1 };
            self.draft(device, &windows_at(1, rows, 120 + position, true), position > 0);
            device.draw_later(self.logits, &draw).unwrap();
        }
        device.drawn().unwrap();
        self.step(device, &windows(1, 4));
        let [x, kept] = [self.planes[0], self.drafter.planes[0]];
        device.copy_rows(x, &[0, 1, 2, 3], kept, &[4, 5, 6, 7]).unwrap();
        let draws = [0, 1, 2, 3].map(|row| crate::draw::plain(row, VOCABULARY as u32));
        device.draw(self.logits, &draws).unwrap();
    }

    fn step(&self, device: &mut dyn Device, of: &Step) {
        let rows = of.rows().len();
        let [x, update, normed, ..] = self.planes;
        let all: Vec<usize> = (0..rows).collect();
        device.begin(of).unwrap();
        device.copy_rows(self.start, &all, x, &all).unwrap();
        device.norm(x, rows, self.layers[0].norm, 1e-6, normed).unwrap();
        for layer in (0..self.turns).flat_map(|_| &self.layers) {
            match &layer.mixer {
                Mixer::DeltaNet(to, pool, [taps, decay, dt_bias, norm]) => {
                    let [qkv, z, a, b, mixed, out] = self.delta;
                    let targets = [(to[0], qkv), (to[1], z), (to[2], a), (to[3], b)];
                    device.linear(normed, rows, &targets).unwrap();
                    device.conv(qkv, *taps, *pool, mixed).unwrap();
                    device.delta_rule(mixed, a, b, *decay, *dt_bias, *pool, out).unwrap();
                    device.gated_norm(out, z, rows, *norm, 1e-6).unwrap();
                    device.linear(out, rows, &[(to[4], update)]).unwrap();
                }
                Mixer::Attention(to, pool, [q_norm, k_norm]) => {
                    let [qg, k, v, q, attended] = self.attention;
                    device.linear(normed, rows, &[(to[0], qg), (to[1], k), (to[2], v)]).unwrap();
                    device.qk_norm_rope(qg, k, *q_norm, *k_norm, 1e-6, self.rotary, FAMILY, q).unwrap();
                    device.kv_append(k, v, *pool).unwrap();
                    device.attention(q, FAMILY, *pool, attended).unwrap();
                    device.out_gate(attended, qg, rows, FAMILY).unwrap();
                    device.linear(attended, rows, &[(to[3], update)]).unwrap();
                }
            }
            let weights = (layer.norm, layer.experts, &layer.others, self.picks);
            queue(device, &self.planes, self.routed, rows, weights);
        }
        device.linear(normed, rows, &[(self.head, self.logits)]).unwrap();
    }
}

/// Windows of so many rows after 120 tokens.
fn windows(windows: usize, rows: usize) -> Step {
    windows_at(windows, rows, 120, rows == 1)
}

fn windows_at(windows: usize, rows: usize, start: usize, commit: bool) -> Step {
    let of = |at| window(at as u32, at * rows, rows, start, 3 * at as u32, commit);
    let list: Vec<_> = (0..windows).map(of).collect();
    let row = |window: &device::Window, row| Row { token: Some(1), position: [window.index(row) as u32; 3] };
    let of = list.iter().flat_map(|window| (0..window.rows).map(move |at| row(window, at))).collect();
    Step::new(of, list).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn time_of_steps() {
    let device = &mut crate::cuda();
    let network = Network::new(device);
    for (count, rows) in [(1, 1), (1, 4), (4, 1), (8, 1), (32, 1)] {
        let of = windows(count, rows);
        let draws: Vec<Draw> =
            (0..count * rows).map(|row| crate::draw::plain(row, VOCABULARY as u32)).collect();
        let forward = time(device, network.planes[0], 4, |device| network.step(device, &of));
        let drawn = time(device, network.planes[0], 4, |device| {
            network.step(device, &of);
            device.draw(network.logits, &draws).unwrap();
        });
        let (mut picked, _) = device.read_picks(network.picks, count * rows).unwrap();
        picked.sort_unstable();
        picked.dedup();
        println!(
            "{} experts, step of {count} windows of {rows}: {:.1} us, {:.1} us with draws",
            picked.len(),
            forward * 1e6,
            drawn * 1e6
        );
    }
}

/// Rounds of one stream, after which one row of four is accepted, or all.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn time_of_rounds() {
    let device = &mut crate::cuda();
    let mut network = Network::new(device);
    // Every layer of the step has states of its own, as in a model.
    let layers = std::mem::take(&mut network.layers);
    let mut pools = Vec::new();
    for turn in 0..TURNS {
        for layer in &layers {
            let mixer = match &layer.mixer {
                Mixer::DeltaNet(to, pool, vectors) => {
                    pools.push(if turn == 0 { *pool } else { device.state_pool(DELTA, 2).unwrap() });
                    Mixer::DeltaNet(*to, pools[pools.len() - 1], *vectors)
                }
                Mixer::Attention(to, pool, norms) => Mixer::Attention(*to, *pool, *norms),
            };
            let Layer { experts, others, norm, .. } = *layer;
            network.layers.push(Layer { mixer, experts, others, norm });
        }
    }
    network.turns = 1;
    network.step(device, &windows(1, 4));
    for accepted in [&[0][..], &[0, 1, 2, 3]] {
        let round = time(device, network.planes[0], 20, |device| network.round(device, &pools, accepted));
        println!("round of one stream, {} rows kept: {:.1} us", accepted.len(), round * 1e6);
    }
}
