//! Draws: every cut, penalties, masks, log-probabilities, faults.

use device::{Adjust, Device, Draw, Drawn, Row, Step};

use crate::matrices::{MLX, Random, grouped};
use crate::{Kind, Noise, Pair, assert_bits, filled, read, window};

pub(crate) fn plain(row: usize, vocabulary: u32) -> Draw {
    Draw { seed: 5, ..Draw::greedy(row, 9, vocabulary) }
}

/// Token, log-probability bits and best tokens as floats that compare bit by bit.
fn flat(drawn: &[Drawn]) -> Vec<f32> {
    let of = |d: &Drawn| {
        let mut words = vec![d.token.map_or(-1.0, |token| token as f32), d.logprob];
        words.extend(d.top.iter().flat_map(|&(id, logprob)| [id as f32, logprob]));
        words
    };
    drawn.iter().flat_map(of).collect()
}

/// A draw with settings of the seed.
fn any(noise: &mut Noise, row: usize, width: usize) -> Draw {
    let vocabulary = [width, width - 3, width + 5, width / 2][noise.below(4)] as u32;
    let mut draw = plain(row, vocabulary);
    draw.temperature = [0.0, 1.0, 0.7, 0.05, 2.5][noise.below(5)];
    draw.top_k = [0, 1, 5, 20, 40, 5000][noise.below(6)];
    draw.top_p = [1.0, 0.95, 0.5, 0.01, 0.0, 0.999][noise.below(6)];
    draw.min_p = [0.0, 0.0, 0.05, 0.5, 1.0][noise.below(5)];
    draw.seed = (noise.next() as u64) << 32 | noise.next() as u64;
    (draw.choice, draw.position) = (noise.next() % 4, noise.next() as u64 * 5);
    draw.top_logprobs = [0, 0, 1, 5, 20][noise.below(5)];
    if noise.below(3) == 0 {
        let mut tokens: Vec<u32> = (0..40).map(|_| noise.next() % width as u32).collect();
        tokens.sort_unstable();
        tokens.dedup();
        let adjust = |token| Adjust { token, repetition: 1.3, frequency: 0.25, presence: 0.5, bias: 1.0 };
        draw.adjust = tokens.into_iter().map(adjust).collect();
    }
    if noise.below(3) == 0 {
        let mut mask: Vec<u32> = (0..width.div_ceil(32)).map(|_| noise.next() & noise.next()).collect();
        mask[0] |= 2;
        draw.mask = Some(mask);
    }
    draw
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn draws() {
    draws_of(&[64, 4096, 8191, 151_936, 248_320], 40);
}

/// So many draws of rows of these widths, alone and together.
pub(crate) fn draws_of(widths: &[usize], count: usize) {
    let mut pair = Pair::new();
    for (at, &width) in widths.iter().enumerate() {
        for kind in [Kind::Random, Kind::Tied, Kind::Zero, Kind::Huge, Kind::Spread, Kind::Faulty] {
            let mut noise = Noise::new(at as u64 * 10 + kind as u64);
            let rows = 4;
            let scale = if kind == Kind::Random { 4.0 } else { 1.0 };
            let logits: Vec<f64> = kind.values(&mut noise, rows, width).iter().map(|x| x * scale).collect();
            let draws: Vec<Draw> = (0..count).map(|i| any(&mut noise, i % rows, width)).collect();
            let mut lists: Vec<Vec<Draw>> = draws.iter().map(|draw| vec![draw.clone()]).collect();
            lists.push(draws);
            let (mut cpu, mut cuda) = (Vec::new(), Vec::new());
            for (device, found) in
                [(&mut pair.cpu as &mut dyn Device, &mut cpu), (&mut pair.cuda as &mut dyn Device, &mut cuda)]
            {
                let logits = filled(device, width, &logits);
                for list in &lists {
                    found.push(device.draw(logits, list).unwrap());
                }
            }
            for ((cpu, cuda), list) in cpu.iter().zip(&cuda).zip(&lists) {
                let same = |x: &f32, y: &f32| x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
                let (cpu, cuda) = (flat(cpu), flat(cuda));
                let equal = cpu.len() == cuda.len() && cpu.iter().zip(&cuda).all(|(x, y)| same(x, y));
                let one = if list.len() == 1 {
                    format!("{:?}", Draw { mask: None, ..list[0].clone() })
                } else {
                    "all".into()
                };
                assert!(equal, "{width} {kind:?}: cuda {cuda:?}, cpu {cpu:?} of {one}");
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_empty_mask_is_refused() {
    let mut pair = Pair::new();
    for device in [&mut pair.cpu as &mut dyn Device, &mut pair.cuda] {
        let logits = filled(device, 100, &[0.5; 100]);
        let mut draw = plain(0, 90);
        draw.mask = Some(vec![0, 0, 1 << 30, 0]);
        let error = device.draw(logits, &[draw]).err().unwrap().to_string();
        assert!(error.contains("the mask is empty"), "{error}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn time_of_a_draw() {
    let mut device = crate::cuda();
    let width = 248_320;
    let mut noise = Noise::new(3);
    let values: Vec<f64> = noise.values(width).iter().map(|x| x * 4.0).collect();
    let logits = filled(&mut device, width, &values);
    let sampled = Draw { temperature: 0.7, top_k: 20, top_p: 0.95, ..plain(0, width as u32) };
    let nucleus = Draw { temperature: 1.0, top_p: 0.95, ..plain(0, width as u32) };
    let free = Draw { temperature: 1.0, ..plain(0, width as u32) };
    for (name, draw) in
        [("greedy", plain(0, width as u32)), ("top-k", sampled), ("top-p", nucleus), ("free", free)]
    {
        let mut best = f64::INFINITY;
        for _ in 0..20 {
            let start = std::time::Instant::now();
            device.draw(logits, std::slice::from_ref(&draw)).unwrap();
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!("draw {name}: {:.1} us with waiting", best * 1e6);
    }
}

/// Answers that wait are those of draws at once; embeddings of draws are those of their tokens, token 0 where
/// a draw gave none.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn draws_answered_later_are_the_same() {
    let mut device = crate::cuda();
    let (width, cols) = (300, 256);
    let mut noise = Noise::new(8);
    let logits = Kind::Faulty.values(&mut noise, 5, width);
    let logits = filled(&mut device, width, &logits);
    let table = device.matrix(&grouped(&mut Random(6), width, cols, MLX)).unwrap();
    let first: Vec<Draw> = (0..5).map(|row| any(&mut noise, row, width)).collect();
    let second: Vec<Draw> = (0..3).map(|row| any(&mut noise, row, width)).collect();
    let [first_drawn, second_drawn] = [&first, &second].map(|draws| device.draw(logits, draws).unwrap());
    assert!(first_drawn[1].token.is_none() && first_drawn[0].token.is_some(), "a fault among them");
    let of = [3, 1, 0, 0];
    let [later, at_once] = [(); 2].map(|()| device.buffer(4, cols).unwrap());
    for _ in 0..3 {
        device.draw_later(logits, &first).unwrap();
        device.embed_drawn(table, &of, later).unwrap();
        device.draw_later(logits, &second).unwrap();
        let drawn = device.drawn().unwrap();
        assert_bits(&flat(&drawn), &flat(&[first_drawn.clone(), second_drawn.clone()].concat()), "draws");
        let rows = of.map(|at| Row { token: Some(first_drawn[at].token.unwrap_or(0)), position: [0; 3] });
        let tokens = Step::new(rows.to_vec(), vec![window(0, 0, 4, 0, 0, true)]).unwrap();
        device.begin(&tokens).unwrap();
        device.embed(table, at_once).unwrap();
        let [later, at_once] = [later, at_once].map(|buffer| read(&mut device, buffer, 4 * cols));
        assert_bits(&later, &at_once, "embeddings");
    }
    // What waits is forgotten by a draw at once.
    device.draw_later(logits, &second).unwrap();
    assert_eq!(device.draw(logits, &first).unwrap().len(), first.len());
    assert!(device.drawn().unwrap().is_empty());
    let error = device.embed_drawn(table, &[5], later).err().unwrap().to_string();
    assert!(error.contains("draw 5 of 5"), "{error}");
}
