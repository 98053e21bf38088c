//! Pictures of prompts on their way through the model: one batch at a time, in slices, and the features
//! they left.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use model::{Features, ImageSpec, Picture};

use crate::core::Core;
use crate::event::ReplyError;
use crate::running::Running;

type Digest = [u8; 32];

/// Share of the prefix cache's bytes that features of pictures may take.
const FEATURES_SHARE: u64 = 8;
/// Part of the longest stall that a slice of encoding may take where streams run.
const SLICES: u32 = 2;

/// A picture's features, kept by content.
struct Kept {
    features: Arc<Features>,
    /// Tick of the last use.
    used: u64,
}

/// Pictures being encoded, and a cache of features by content within a limit of bytes.
pub(crate) struct Encoder {
    spec: Option<ImageSpec>,
    /// The batch in the model, in its order; empty where nothing is encoded.
    batch: Vec<Digest>,
    kept: HashMap<Digest, Kept>,
    bytes: u64,
    bytes_max: u64,
    uses: u64,
}

impl Encoder {
    /// An encoder for a model that takes pictures of this kind, beside a cache of `cache_bytes`.
    pub(crate) fn new(spec: Option<ImageSpec>, cache_bytes: u64) -> Self {
        let bytes_max = if spec.is_some() { cache_bytes / FEATURES_SHARE } else { 0 };
        Self { spec, batch: Vec::new(), kept: HashMap::new(), bytes: 0, bytes_max, uses: 0 }
    }

    /// Most bytes of kept features.
    pub(crate) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Bytes of kept features.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether pictures are being encoded.
    pub(crate) fn busy(&self) -> bool {
        !self.batch.is_empty()
    }

    fn find(&mut self, digest: &Digest) -> Option<Arc<Features>> {
        self.uses += 1;
        let kept = self.kept.get_mut(digest)?;
        kept.used = self.uses;
        Some(Arc::clone(&kept.features))
    }

    /// Keeps features, the longest unused ones going first where room is needed.
    fn keep(&mut self, digest: Digest, features: &Arc<Features>) {
        let size = |features: &Features| features.bytes() as u64 + size_of::<(Digest, Kept)>() as u64;
        let bytes = size(features);
        if bytes > self.bytes_max || self.kept.contains_key(&digest) {
            return;
        }
        while self.bytes + bytes > self.bytes_max {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used).map(|(digest, _)| *digest);
            let Some(gone) = oldest.and_then(|digest| self.kept.remove(&digest)) else { return };
            self.bytes -= size(&gone.features);
        }
        self.uses += 1;
        self.bytes += bytes;
        self.kept.insert(digest, Kept { features: Arc::clone(features), used: self.uses });
    }
}

impl Core {
    /// Gives running prompts the pictures that are known and goes on encoding the others, in a slice that
    /// keeps streams within the longest stall. Gives the time it took.
    pub(crate) fn encode(&mut self) -> Duration {
        if self.encoder.spec.is_none() {
            return Duration::ZERO;
        }
        self.hand_out();
        let wanted = self.wanted();
        // What nobody waits for any more is not finished.
        if !self.encoder.batch.iter().any(|digest| wanted.iter().any(|(other, _)| other == digest)) {
            self.encoder.batch.clear();
        }
        let awaits = |slot: &usize| self.slots[*slot].as_ref().is_some_and(Running::awaits_picture);
        let awaiting: Vec<usize> = (0..self.slots.len()).filter(awaits).collect();
        let before = self.clock.now();
        let ended = match self.encoder.busy() || self.begin_batch(wanted) {
            true => self.slice(before),
            false => return Duration::ZERO,
        };
        if let Some(features) = ended {
            let batch = std::mem::take(&mut self.encoder.batch);
            self.counters.pictures_encoded += batch.len() as u64;
            for (digest, features) in batch.into_iter().zip(features.into_iter().map(Arc::new)) {
                self.encoder.keep(digest, &features);
                self.give(&digest, &features);
            }
        }
        let took = self.clock.now().saturating_sub(before);
        for slot in awaiting {
            if let Some(running) = &mut self.slots[slot] {
                running.image += took;
            }
        }
        took
    }

    /// Features that are kept go to the prompts that miss them.
    fn hand_out(&mut self) {
        for running in self.slots.iter_mut().flatten().filter(|running| running.prefills()) {
            let missing: Vec<usize> = running.missing().collect();
            for at in missing {
                let found = self.encoder.find(&running.request.pictures[at].picture.digest);
                self.counters.pictures_cached += u64::from(found.is_some());
                running.features[at] = found;
            }
        }
    }

    /// Gives one picture's features to every prompt that misses them.
    fn give(&mut self, digest: &Digest, features: &Arc<Features>) {
        for running in self.slots.iter_mut().flatten().filter(|running| running.prefills()) {
            let missing: Vec<usize> = running.missing().collect();
            for at in missing {
                if running.request.pictures[at].picture.digest == *digest {
                    running.features[at] = Some(Arc::clone(features));
                }
            }
        }
    }

    /// Pictures that running prompts miss, each once, oldest request first.
    fn wanted(&self) -> Vec<(Digest, Arc<Picture>)> {
        let mut running: Vec<_> = self.slots.iter().flatten().filter(|running| running.prefills()).collect();
        running.sort_by_key(|running| (running.order, running.choice));
        let mut wanted: Vec<(Digest, Arc<Picture>)> = Vec::new();
        for running in running {
            for at in running.missing() {
                let picture = &running.request.pictures[at].picture;
                if wanted.iter().all(|(digest, _)| *digest != picture.digest) {
                    wanted.push((picture.digest, Arc::clone(picture)));
                }
            }
        }
        wanted
    }

    /// Hands the model as many of the wanted pictures as it takes together. False: none.
    fn begin_batch(&mut self, wanted: Vec<(Digest, Arc<Picture>)>) -> bool {
        let Some(spec) = self.encoder.spec else { return false };
        let patches_max = spec.tokens_max * spec.merge * spec.merge;
        let (mut patches, mut pictures) = (0, Vec::new());
        for (digest, picture) in wanted {
            patches += picture.count();
            if pictures.len() == spec.pictures_max || patches > patches_max {
                break;
            }
            self.encoder.batch.push(digest);
            pictures.push(picture);
        }
        if pictures.is_empty() {
            return false;
        }
        if let Err(error) = self.model.encode(&pictures) {
            self.fail_batch(&error.to_string());
        }
        true
    }

    /// Encodes for a while. `Some`: the batch's features.
    fn slice(&mut self, before: Duration) -> Option<Vec<Features>> {
        let streams = self.slots.iter().flatten().any(|running| !running.prefills());
        // Alone the model only stops to hear of new and cancelled requests.
        let budget = self.settings.max_stall / if streams { SLICES } else { 1 };
        while self.encoder.busy() {
            match self.model.encode_next(1) {
                Ok(Some(features)) => return Some(features),
                Ok(None) if self.clock.now().saturating_sub(before) >= budget => return None,
                Ok(None) => {}
                Err(error) => self.fail_batch(&error.to_string()),
            }
        }
        None
    }

    /// The batch cannot be encoded: whoever waits for one of its pictures hears of it.
    fn fail_batch(&mut self, message: &str) {
        let batch = std::mem::take(&mut self.encoder.batch);
        for slot in 0..self.slots.len() {
            let waits = self.slots[slot].as_ref().is_some_and(|running| {
                let mut missing = running.missing();
                running.prefills()
                    && missing.any(|at| batch.contains(&running.request.pictures[at].picture.digest))
            });
            if waits {
                self.fail(slot, ReplyError::DeviceFault { message: message.to_owned() });
            }
        }
    }
}
