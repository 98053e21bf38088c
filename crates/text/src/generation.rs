//! Sampling defaults and end tokens of a model folder.

use std::path::Path;

use serde_json::Value;

use crate::error::TextError;
use crate::files;

/// Largest `config.json` or `generation_config.json`, bytes.
pub const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Most end tokens.
pub const STOP_IDS_MAX: usize = 256;

/// What the model folder says about sampling, for requests that do not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Temperature; 0 if the folder says `do_sample: false`.
    pub temperature: Option<f64>,
    /// Share of probability kept.
    pub top_p: Option<f64>,
    /// Tokens kept; 0 is all.
    pub top_k: Option<u32>,
    /// Least probability kept, as a share of the highest.
    pub min_p: Option<f64>,
    /// Penalty on tokens seen before.
    pub repetition_penalty: Option<f64>,
    /// Ids that end a reply, ascending: those of `config.json` (top level and `text_config`) and of
    /// `generation_config.json` together.
    pub stop_ids: Vec<u32>,
}

impl GenerationDefaults {
    /// Reads `generation_config.json` (which may be absent) and the end tokens of `config.json`.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let config: Value =
            files::json("config.json", &files::read(&dir.join("config.json"), CONFIG_BYTES_MAX)?)?;
        let generation = match files::read_if_there(&dir.join("generation_config.json"), CONFIG_BYTES_MAX)? {
            Some(data) => files::json("generation_config.json", &data)?,
            None => Value::Null,
        };
        Self::merge(&config, &generation)
    }

    /// Merges the two files' contents; `generation` may be null.
    pub fn merge(config: &Value, generation: &Value) -> Result<Self, TextError> {
        let number = |key: &'static str, low: f64, high: f64| bounded(generation, key, low, high);
        let greedy = generation["do_sample"] == false;
        let temperature = number("temperature", 0.0, 5.0)?;
        let mut stop_ids = Vec::new();
        stops("config.json", &config["eos_token_id"], &mut stop_ids)?;
        stops("config.json", &config["text_config"]["eos_token_id"], &mut stop_ids)?;
        stops("generation_config.json", &generation["eos_token_id"], &mut stop_ids)?;
        stop_ids.sort_unstable();
        stop_ids.dedup();
        Ok(Self {
            temperature: if greedy { Some(0.0) } else { temperature },
            top_p: number("top_p", 0.0, 1.0)?.filter(|&top_p| top_p > 0.0),
            top_k: number("top_k", 0.0, f64::from(u32::MAX))?.map(|top_k| top_k as u32),
            min_p: number("min_p", 0.0, 1.0)?,
            repetition_penalty: number("repetition_penalty", 0.0, 10.0)?.filter(|&penalty| penalty > 0.0),
            stop_ids,
        })
    }
}

fn bounded(generation: &Value, key: &'static str, low: f64, high: f64) -> Result<Option<f64>, TextError> {
    match &generation[key] {
        Value::Null => Ok(None),
        value => match value.as_f64() {
            Some(number) if (low..=high).contains(&number) => Ok(Some(number)),
            _ => Err(TextError::Json {
                file: "generation_config.json",
                detail: format!("{key} must be a number from {low} to {high}, not {value}"),
            }),
        },
    }
}

fn stops(file: &'static str, value: &Value, ids: &mut Vec<u32>) -> Result<(), TextError> {
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| TextError::Json { file, detail: format!("eos_token_id: {value} is not a token id") })
    };
    match value {
        Value::Null => {}
        Value::Array(list) if list.len() <= STOP_IDS_MAX => {
            for value in list {
                ids.push(id(value)?);
            }
        }
        Value::Array(list) => {
            let detail = format!("eos_token_id: {} ids, at most {STOP_IDS_MAX}", list.len());
            return Err(TextError::Json { file, detail });
        }
        value => ids.push(id(value)?),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn end_tokens_of_all_places() {
        let merge = |config: Value, generation: Value| GenerationDefaults::merge(&config, &generation);
        let defaults = merge(
            json!({"eos_token_id": [9, 2], "text_config": {"eos_token_id": 5}}),
            json!({"eos_token_id": [7, 5], "temperature": 0.3, "top_k": 20, "top_p": 0.9, "do_sample": true}),
        )
        .unwrap();
        assert_eq!(defaults.stop_ids, [2, 5, 7, 9]);
        assert_eq!((defaults.temperature, defaults.top_k, defaults.top_p), (Some(0.3), Some(20), Some(0.9)));
        let greedy = merge(json!({}), json!({"do_sample": false, "temperature": 0.7})).unwrap();
        assert_eq!(greedy.temperature, Some(0.0));
        assert_eq!(merge(json!({}), Value::Null).unwrap(), GenerationDefaults::default());
        for generation in [json!({"top_p": 3}), json!({"top_k": "x"}), json!({"eos_token_id": -1})] {
            assert!(merge(json!({}), generation).is_err());
        }
    }
}
