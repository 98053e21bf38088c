//! Matrices and routed experts of the CUDA device: the CPU device's bits, and how fast they come.

use std::time::Instant;

use device::cuda::Cuda;
use device::{Buffer, Device, MatrixRef};
use quant::{Dtype, Encoding, Matrix, Scheme, Zero, bf16_from_f32};

pub(crate) use self::weights::{Random, dense};
use self::weights::{grouped_of, scales};
use super::{Pair, cpu, cuda, filled, read};

#[path = "../support/weights.rs"]
mod weights;

const DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

/// Random codes, every tenth row of them all at an edge, and scales of which some are zero or too small to
/// count.
pub(crate) fn grouped(random: &mut Random, rows: usize, cols: usize, scheme: Scheme) -> Matrix {
    let row_bytes = cols / 8 * scheme.bits as usize;
    let mut codes: Vec<u8> = (0..rows * row_bytes).map(|_| random.bits() as u8).collect();
    for row in (0..rows).step_by(10) {
        codes[row * row_bytes..(row + 1) * row_bytes].fill(if row % 20 == 0 { 0 } else { 0xff });
    }
    let scales = scales(random, rows * cols / scheme.group);
    grouped_of(rows, cols, scheme, codes, &scales)
}

/// Rows of every kind.
pub(crate) fn activations(random: &mut Random, rows: usize, cols: usize) -> Vec<f64> {
    weights::activations(random, rows, cols, true).into_iter().map(f64::from).collect()
}

/// Results of one device for the first `rows` rows.
fn linear(
    device: &mut dyn Device,
    matrices: &[MatrixRef],
    outs: &[Buffer],
    sizes: &[usize],
    x: Buffer,
    rows: usize,
) -> Vec<Vec<f32>> {
    let to: Vec<_> = matrices.iter().copied().zip(outs.iter().copied()).collect();
    for (&out, &size) in outs.iter().zip(sizes) {
        device.write(out, 0, &vec![f64::NAN; rows * size]).unwrap();
    }
    device.linear(x, rows, &to).unwrap();
    let read = |(&out, &size): (&Buffer, &usize)| {
        let mut values = vec![0f32; rows * size];
        device.read(out, 0, &mut values).unwrap();
        values
    };
    outs.iter().zip(sizes).map(read).collect()
}

/// Counts and prints differing values instead of stopping at the first, so that one run on a card shows all.
fn differences(found: &[f32], expected: &[f32], width: usize, what: &str) -> usize {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differ = |at: &usize| {
        let (f, e) = (found[*at], expected[*at]);
        !(f.to_bits() == e.to_bits() || f.is_nan() && e.is_nan())
    };
    let all: Vec<usize> = (0..found.len()).filter(differ).collect();
    if let Some(&at) = all.first() {
        println!(
            "{what}: {} of {} differ; first row {} output {}: {:e}, expected {:e}",
            all.len(),
            found.len(),
            at / width,
            at % width,
            found[at],
            expected[at]
        );
    }
    all.len()
}

/// All matrices over one input, in one launch, against the CPU, for each row count.
pub(crate) fn check(matrices: &[Matrix], counts: &[usize], seed: u64) -> usize {
    check_on(cuda(), matrices, counts, seed)
}

pub(crate) fn check_on(card: Cuda, matrices: &[Matrix], counts: &[usize], seed: u64) -> usize {
    let most = *counts.iter().max().unwrap();
    check_rows(card, matrices, counts, activations(&mut Random(seed), most, matrices[0].cols()))
}

/// [`check_on`] of these rows.
fn check_rows(card: Cuda, matrices: &[Matrix], counts: &[usize], x: Vec<f64>) -> usize {
    let most = *counts.iter().max().unwrap();
    let cols = matrices[0].cols();
    let sizes: Vec<usize> = matrices.iter().map(Matrix::rows).collect();
    let mut results = Vec::new();
    let devices: [Box<dyn Device>; 2] = [Box::new(cpu()), Box::new(card)];
    for mut device in devices {
        let refs: Vec<_> = matrices.iter().map(|m| device.matrix(m).unwrap()).collect();
        let input = device.buffer(most, cols).unwrap();
        let outs: Vec<_> = sizes.iter().map(|&size| device.buffer(most, size).unwrap()).collect();
        device.write(input, 0, &x).unwrap();
        results.push(
            counts
                .iter()
                .map(|&rows| linear(&mut *device, &refs, &outs, &sizes, input, rows))
                .collect::<Vec<_>>(),
        );
    }
    let mut wrong = 0;
    for (at, &rows) in counts.iter().enumerate() {
        for (which, matrix) in matrices.iter().enumerate() {
            let what = format!("{rows} rows, [{}, {}] {}", matrix.rows(), cols, matrix.encoding());
            wrong += differences(&results[1][at][which], &results[0][at][which], matrix.rows(), &what);
        }
    }
    wrong
}

/// Six matrices that together have every width; group length, zero and scales vary with `turn`.
pub(crate) fn six(
    random: &mut Random,
    outputs: usize,
    cols: usize,
    groups: &[usize],
    turn: usize,
) -> Vec<Matrix> {
    let make = |(at, bits): (usize, u8)| {
        let group = groups[(at + turn) % groups.len()];
        let zero = if (at + turn).is_multiple_of(2) { Zero::Affine } else { Zero::Symmetric };
        grouped(random, outputs, cols, Scheme { bits, group, zero, scales: DTYPES[(at + turn / 2) % 3] })
    };
    [2, 3, 4, 5, 6, 8].into_iter().enumerate().map(make).collect()
}

/// What a card does whose matrix instruction does not sum exactly.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn plain_sums_equal_the_cpu() {
    let mut random = Random(6);
    let matrices = six(&mut random, 40, 1152, &[32, 64, 128], 0);
    let card = crate::open(true);
    assert!(card.name().contains("plain sums"), "{}", card.name());
    assert_eq!(check_on(card, &matrices, &[1, 2, 9, 20, 40], 9), 0);
    assert!(!cuda().name().contains("plain sums"), "only cards that fail");
}

/// Codes that the gated norm makes for the matrix after it, in every group length.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn codes_of_normed_heads_equal_the_cpu() {
    let mut pair = Pair::new();
    let (heads, dim, rows) = (3, 128, 26);
    let width = heads * dim;
    for group in [32, 64, 128] {
        let mut random = Random(group as u64);
        let scheme = Scheme { bits: 4, group, zero: Zero::Affine, scales: Dtype::Bf16 };
        let matrix = grouped(&mut random, 40, width, scheme);
        let weight: Vec<f64> = (0..dim).map(|_| random.normal() as f64).collect();
        let (x, z) = (activations(&mut random, rows, width), activations(&mut random, rows, width));
        pair.same(&format!("a matrix after a gated norm, groups of {group}"), |device| {
            let matrix = device.matrix(&matrix).unwrap();
            let (weight, out) = (device.vector(&weight).unwrap(), device.buffer(rows, 40).unwrap());
            let [x, z] = [&x, &z].map(|values| filled(device, width, values));
            device.gated_norm(x, z, rows, weight, 1e-6).unwrap();
            device.linear(x, rows, &[(matrix, out)]).unwrap();
            let mut found = read(device, out, rows * 40);
            found.extend(read(device, x, rows * width));
            found
        });
    }
}

/// Groups of a row whose units lie far apart: at the edge of what one unit of a slice can hold, and beyond.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_of_wide_spread_equal_the_cpu() {
    let mut random = Random(11);
    let matrices = six(&mut random, 200, 1664, &[64, 128], 0);
    let mut wrong = 0;
    for (below, only) in [(24, 1), (25, 1), (34, 70)] {
        let mut x = activations(&mut random, 300, 1664);
        for row in x.chunks_mut(1664).step_by(only) {
            row[..1000].fill(0.7);
            row[300..700].iter_mut().for_each(|x| *x *= 2f64.powi(-below));
        }
        wrong += check_rows(cuda(), &matrices, &[40, 300], x);
    }
    assert_eq!(wrong, 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn dense_and_mixed_matrices_equal_the_cpu() {
    let mut random = Random(2);
    let mut wrong = 0;
    for cols in [50, 520, 2048] {
        let matrices = DTYPES.map(|dtype| dense(&mut random, 41, cols, dtype));
        wrong += check(&matrices, &[1, 2, 5, 16, 17, 64, 100], 9);
    }
    let scheme = |bits| Scheme { bits, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 };
    let matrices = [
        grouped(&mut random, 256, 2048, scheme(8)),
        grouped(&mut random, 512, 2048, scheme(4)),
        dense(&mut random, 32, 2048, Dtype::Bf16),
        grouped(&mut random, 1, 2048, scheme(8)),
    ];
    wrong += check(&matrices, &[1, 4, 8, 32, 200], 10);
    assert_eq!(wrong, 0);
}

/// Matrices of one way of storing: more tiles than a small card has blocks for, so that blocks take several
/// in turn.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn matrices_alike_equal_the_cpu() {
    let mut random = Random(12);
    let mut wrong = 0;
    let scheme = |bits| Scheme { bits, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 };
    for (bits, outputs, cols) in [(4, 1700, 256), (8, 700, 256), (4, 150, 2048), (3, 70, 4096)] {
        let matrices =
            [grouped(&mut random, outputs, cols, scheme(bits)), grouped(&mut random, 33, cols, scheme(bits))];
        wrong += check(&matrices, &[1, 3, 8], 13);
    }
    assert_eq!(wrong, 0);
}

/// Experts of one layer.
pub(crate) struct Layer {
    gate: Vec<Matrix>,
    up: Vec<Matrix>,
    down: Vec<Matrix>,
}

impl Layer {
    pub(crate) fn new(experts: usize, mut make: impl FnMut(usize, bool) -> Matrix) -> Self {
        let mut kind = |down: bool| (0..experts).map(|expert| make(expert, down)).collect();
        Self { gate: kind(false), up: kind(false), down: kind(true) }
    }
}

/// Routed experts of both devices over the same router logits.
pub(crate) fn check_experts(layer: &Layer, k: usize, counts: &[usize], seed: u64) -> usize {
    let most = *counts.iter().max().unwrap();
    let x = activations(&mut Random(seed), most, layer.gate[0].cols());
    check_expert_rows(layer, k, counts, seed, x)
}

/// [`check_experts`] of these rows.
fn check_expert_rows(layer: &Layer, k: usize, counts: &[usize], seed: u64, x: Vec<f64>) -> usize {
    check_expert_rows_on(cuda(), layer, k, counts, seed, x)
}

pub(crate) fn check_expert_rows_on(
    card: Cuda,
    layer: &Layer,
    k: usize,
    counts: &[usize],
    seed: u64,
    x: Vec<f64>,
) -> usize {
    let most = *counts.iter().max().unwrap();
    let (experts, width) = (layer.gate.len(), layer.gate[0].cols());
    // Some rows choose alike.
    let logits: Vec<f64> = (0..most)
        .flat_map(|row| {
            let mut own = Random(seed + if row % 3 == 0 { 1000 } else { row as u64 });
            (0..experts).map(move |_| own.normal() as f64).collect::<Vec<_>>()
        })
        .collect();
    let devices: [Box<dyn Device>; 2] = [Box::new(cpu()), Box::new(card)];
    let mut results: Vec<Vec<Vec<f32>>> = Vec::new();
    for mut device in devices {
        let packed = device.experts(&layer.gate, &layer.up, &layer.down).unwrap();
        let input = device.buffer(most, width).unwrap();
        let router = device.buffer(most, experts).unwrap();
        let picks = device.picks(most, k).unwrap();
        let out = device.buffer(most * k, width).unwrap();
        device.write(input, 0, &x).unwrap();
        device.write(router, 0, &logits).unwrap();
        let mut run = |&rows: &usize| {
            device.write(out, 0, &vec![f64::NAN; rows * k * width]).unwrap();
            device.route(router, rows, picks).unwrap();
            device.routed_experts(input, rows, picks, packed, out).unwrap();
            let mut values = vec![0f32; rows * k * width];
            device.read(out, 0, &mut values).unwrap();
            values
        };
        results.push(counts.iter().map(&mut run).collect());
    }
    let mut wrong = 0;
    for (at, rows) in counts.iter().enumerate() {
        let what = format!("{rows} rows of {experts} experts, {}", layer.gate[0].encoding());
        wrong += differences(&results[1][at], &results[0][at], width, &what);
    }
    wrong
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn experts_equal_the_cpu() {
    let mut random = Random(3);
    let mut wrong = 0;
    let four = Scheme { bits: 4, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 };
    let layer = Layer::new(16, |_, down| {
        let (rows, cols) = if down { (1088, 512) } else { (512, 1088) };
        grouped(&mut random, rows, cols, four)
    });
    wrong += check_experts(&layer, 4, &[1, 2, 3, 4, 8, 9, 33, 64, 100, 300], 30);
    // Storage that differs between experts, dense ones among them.
    let of = |bits, group, zero| Scheme { bits, group, zero, scales: Dtype::F16 };
    let schemes = [of(4, 32, Zero::Symmetric), of(6, 128, Zero::Affine), of(3, 64, Zero::Affine)];
    let mut at = 0;
    let layer = Layer::new(7, |_, down| {
        let (rows, cols) = if down { (128, 384) } else { (384, 128) };
        at += 1;
        match at % 4 {
            3 => dense(&mut random, rows, cols, Dtype::Bf16),
            at => grouped(&mut random, rows, cols, schemes[at]),
        }
    });
    wrong += check_experts(&layer, 2, &[1, 2, 7, 40, 200], 31);
    let layer = Layer::new(3, |_, down| {
        let (rows, cols) = if down { (40, 50) } else { (50, 40) };
        dense(&mut random, rows, cols, Dtype::F32)
    });
    wrong += check_experts(&layer, 1, &[1, 5, 300], 32);
    assert_eq!(wrong, 0);
}

/// The first 64 rows of a 4-bit matrix in bf16 times a small power of two.
fn damped(matrix: &Matrix, power: i32) -> Matrix {
    let count = 64 * matrix.cols() / 64 * 2;
    let scaled = |part: &[u8]| {
        let mut part = part.to_vec();
        for value in part[..count].chunks_exact_mut(2) {
            let float = f32::from_bits((u16::from_le_bytes([value[0], value[1]]) as u32) << 16);
            value.copy_from_slice(&bf16_from_f32(float * 2f32.powi(power)).to_le_bytes());
        }
        part
    };
    let (scales, biases) = (scaled(matrix.scales()), scaled(matrix.biases()));
    let codes = matrix.codes().to_vec();
    Matrix::new(matrix.rows(), matrix.cols(), matrix.encoding(), codes.into(), scales.into(), biases.into())
        .unwrap()
}

/// Rows and hidden rows whose groups lie too far apart for one unit, some of those of a tile.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn wide_expert_rows_equal_the_cpu() {
    let mut random = Random(12);
    let mut at = 0;
    let layer = Layer::new(4, |_, down| {
        let (rows, cols) = if down { (192, 256) } else { (256, 192) };
        at += 1;
        let matrix = grouped(&mut random, rows, cols, MLX);
        // Up of the first two experts.
        if (5..7).contains(&at) { damped(&matrix, -35) } else { matrix }
    });
    let mut wrong = check_experts(&layer, 2, &[70, 300], 33);
    let mut x = activations(&mut Random(34), 300, 192);
    for row in x.chunks_mut(192).step_by(9) {
        row.fill(0.7);
        row[64..128].iter_mut().for_each(|x| *x *= 2f64.powi(-30));
    }
    wrong += check_expert_rows(&layer, 2, &[300], 34, x);
    assert_eq!(wrong, 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn embedding_rows_equal_the_cpu() {
    let mut random = Random(4);
    let mut tables = six(&mut random, 300, 1152, &[32, 64, 128], 1);
    tables.extend(DTYPES.map(|dtype| dense(&mut random, 300, 1152, dtype)));
    let tokens = [Some(0), Some(299), None, Some(17), Some(40)];
    let rows = tokens.map(|token| device::Row { token, position: [0; 3] }).to_vec();
    let window =
        device::Window { place: 0, first: 0, rows: 5, start: 0, pages: vec![0], parents: None, commit: true };
    let step = device::Step::new(rows, vec![window]).unwrap();
    let mut results = Vec::new();
    let devices: [Box<dyn Device>; 2] = [Box::new(cpu()), Box::new(cuda())];
    for mut device in devices {
        let out = device.buffer(5, 1152).unwrap();
        device.begin(&step).unwrap();
        let mut values = vec![0f32; 5 * 1152 * tables.len()];
        for (table, values) in tables.iter().zip(values.chunks_mut(5 * 1152)) {
            let table = device.matrix(table).unwrap();
            device.embed(table, out).unwrap();
            device.read(out, 0, values).unwrap();
        }
        results.push(values);
    }
    assert_eq!(differences(&results[1], &results[0], 1152, "embedding"), 0);
}

/// A large matrix out of a repeated random block.
pub(crate) fn large(outputs: usize, cols: usize, scheme: Scheme, seed: u64) -> Matrix {
    let block = grouped(&mut Random(seed), 64, cols, scheme);
    let repeat = |part: &[u8]| part.repeat(outputs.div_ceil(64))[..part.len() / 64 * outputs].to_vec();
    let (codes, scales, biases) = (repeat(block.codes()), repeat(block.scales()), repeat(block.biases()));
    Matrix::new(outputs, cols, Encoding::Grouped(scheme), codes.into(), scales.into(), biases.into()).unwrap()
}

/// Seconds of one flush of `work`, the best of some.
fn seconds(device: &mut Cuda, small: Buffer, work: impl Fn(&mut Cuda)) -> f64 {
    let mut one = [0f32];
    let mut best = f64::MAX;
    for _ in 0..8 {
        device.read(small, 0, &mut one).unwrap();
        let start = Instant::now();
        work(device);
        device.read(small, 0, &mut one).unwrap();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

pub(crate) const MLX: Scheme = Scheme { bits: 4, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 };

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn speed_of_linear() {
    let mut device = cuda();
    let small = device.buffer(1, 1).unwrap();
    for (name, shapes, cols) in [
        ("delta-net in", &[8192, 4096, 32, 32][..], 2048),
        ("delta-net out", &[2048], 4096),
        ("attention q k v", &[8192, 512, 512], 2048),
        ("shared gate up", &[512, 512], 2048),
        ("head", &[248_320], 2048),
    ] {
        let bytes: usize = shapes.iter().map(|&n| n * cols / 2 + n * cols / 64 * 4).sum();
        // Several copies, more than the cache holds.
        let copies = (400_000_000 / bytes).clamp(1, 64);
        let sets: Vec<Vec<(MatrixRef, Buffer)>> = (0..copies)
            .map(|copy| {
                let make = |&n: &usize| {
                    let matrix = device.matrix(&large(n, cols, MLX, copy as u64)).unwrap();
                    (matrix, device.buffer(if n > 100_000 { 32 } else { 2048 }, n).unwrap())
                };
                shapes.iter().map(make).collect()
            })
            .collect();
        let x = device.buffer(2048, cols).unwrap();
        let values = activations(&mut Random(5), 1, cols);
        for row in 0..2048 {
            device.write(x, row, &values).unwrap();
        }
        for rows in [1, 2, 4, 8, 16, 32, 64, 256, 512, 2048] {
            if name == "head" && rows > 32 {
                continue;
            }
            let repeats = if rows <= 32 { 64usize.div_ceil(copies) } else { 1 };
            let run = |device: &mut Cuda| {
                for set in (0..repeats).flat_map(|_| &sets) {
                    device.linear(x, rows, set).unwrap();
                }
            };
            let time = seconds(&mut device, small, run) / (repeats * copies) as f64;
            let operations = bytes as f64 / 0.5625 * 2.0 * rows as f64;
            println!(
                "{name:16} {rows:5} rows {:9.2} us {:7.0} GB/s {:7.1} TFLOP/s",
                time * 1e6,
                bytes as f64 / time / 1e9,
                operations / time / 1e12
            );
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn speed_of_experts() {
    let mut device = cuda();
    let small = device.buffer(1, 1).unwrap();
    let (experts, width, inner, k) = (256, 2048, 512, 8);
    let one = large(inner, width, MLX, 1);
    let down = large(width, inner, MLX, 2);
    let (gate, down) = (vec![one; experts], vec![down; experts]);
    let layers: Vec<_> = (0..3).map(|_| device.experts(&gate, &gate, &down).unwrap()).collect();
    let most = 2048;
    let (x, router) = (device.buffer(most, width).unwrap(), device.buffer(most, experts).unwrap());
    let (picks, out) = (device.picks(most, k).unwrap(), device.buffer(most * k, width).unwrap());
    let mut random = Random(6);
    for row in 0..most {
        device.write(x, row, &activations(&mut Random(7), 1, width)).unwrap();
        device.write(router, row, &(0..experts).map(|_| random.normal() as f64).collect::<Vec<_>>()).unwrap();
    }
    for rows in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048] {
        device.route(router, rows, picks).unwrap();
        let (ids, _) = device.read_picks(picks, rows).unwrap();
        let mut distinct = ids.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let repeats = if rows <= 32 { 16 } else { 1 };
        let run = |device: &mut Cuda| {
            for &layer in (0..repeats).flat_map(|_| &layers) {
                device.routed_experts(x, rows, picks, layer, out).unwrap();
            }
        };
        let time = seconds(&mut device, small, run) / (repeats * layers.len()) as f64;
        let matrix = (inner * width) as f64;
        let bytes = distinct.len() as f64 * 3.0 * matrix * 0.5625;
        println!(
            "experts {rows:5} rows, {:3} experts {:9.2} us {:7.0} GB/s {:7.1} TFLOP/s",
            distinct.len(),
            time * 1e6,
            bytes / time / 1e9,
            (rows * k) as f64 * 6.0 * matrix / time / 1e12
        );
    }
}
