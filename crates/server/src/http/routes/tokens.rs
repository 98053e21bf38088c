//! Tokens and text, both ways.

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value};
use text::Specials;
use utoipa::ToSchema;

use super::super::app::json;
use super::super::asked::{Asked, Incoming};
use super::super::chat::{ChatRequest, NoteView, notes_view, prepare};
use super::super::error::{ApiError, Code};
use super::super::fields::{Fields, unexpected};
use super::super::params::id_list;
use super::super::state::{App, Served};

/// Fields of `POST /tokenize` for text; with `messages` the fields are those of a chat request.
#[derive(Clone, Debug, Default, ToSchema)]
pub(crate) struct TokenizeRequest {
    /// The text. Also as `content`.
    pub prompt: String,
    /// Whether control spellings become control tokens.
    pub parse_special: bool,
    /// Whether to list the text of each token.
    pub with_pieces: bool,
}

/// `POST /tokenize`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Tokens {
    /// Ids, or with `with_pieces` objects.
    pub tokens: TokenList,
    /// How many.
    pub count: usize,
    /// Tokens that one request can use.
    pub max_model_len: usize,
}

/// Ids, or more about each.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum TokenList {
    /// Ids.
    Ids(Vec<u32>),
    /// Ids with their text.
    Pieces(Vec<TokenPiece>),
}

/// A token.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TokenPiece {
    /// Its id.
    pub id: u32,
    /// Its text; U+FFFD where it is no whole text.
    pub piece: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// Fields of `POST /detokenize`.
#[derive(Clone, Debug, ToSchema)]
pub(crate) struct DetokenizeRequest {
    /// Ids.
    pub tokens: Vec<u32>,
}

/// `POST /detokenize`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Detokenized {
    /// The text.
    pub prompt: String,
    /// The same.
    pub content: String,
}

/// `GET /tokenizer_info`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TokenizerInfo {
    /// Class of the model's folder.
    pub tokenizer_class: String,
    /// Always null.
    pub bos_token: Option<String>,
    /// Ends a turn.
    pub eos_token: Option<String>,
    /// Fills rows.
    pub pad_token: Option<String>,
    /// Token ids.
    pub vocab_size: usize,
    /// The template's text.
    pub chat_template: String,
}

/// `POST /apply-template`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Applied {
    /// The prompt's text.
    pub prompt: String,
    /// The prompt's ids.
    pub prompt_token_ids: Vec<u32>,
    /// What was done on the client's behalf.
    pub notes: Vec<NoteView>,
}

/// Ids of a text or of a chat.
#[utoipa::path(post, path = "/tokenize", tag = "Tokens", request_body = TokenizeRequest,
    responses((status = 200, body = Tokens)))]
pub(crate) async fn tokenize(Incoming(asked): Incoming) -> Result<Response, ApiError> {
    let tokens = |asked: &Asked| {
        let (mut map, served) = (asked.object()?, &asked.served);
        let (ids, with_pieces) = if map.contains_key("messages") {
            let with_pieces = map.swap_remove("with_pieces") == Some(Value::Bool(true));
            (applied(asked, map)?.prompt_token_ids, with_pieces)
        } else {
            let request = TokenizeRequest::read(map)?;
            (text_ids(served, &request)?, request.with_pieces)
        };
        let count = ids.len();
        let tokens = if with_pieces { TokenList::Pieces(pieces(served, &ids)) } else { TokenList::Ids(ids) };
        Ok(json(&Tokens { tokens, count, max_model_len: served.context() }))
    };
    asked.prepare(tokens).await
}

impl TokenizeRequest {
    fn read(map: Map<String, Value>) -> Result<Self, ApiError> {
        let mut fields = Fields::new(map);
        let prompt = fields.string("prompt", usize::MAX)?;
        let prompt = prompt.or(fields.string("content", usize::MAX)?);
        // The family's tokenizers put no tokens around a text, so both answers are the same.
        fields.bool("add_special_tokens")?;
        fields.bool("add_special")?;
        Ok(Self {
            prompt: prompt.ok_or_else(|| ApiError::at(Code::MissingField, "prompt", "a text is needed"))?,
            parse_special: fields.flag("parse_special", true)?,
            with_pieces: fields.flag("with_pieces", false)?,
        })
    }
}

fn text_ids(served: &Served, request: &TokenizeRequest) -> Result<Vec<u32>, ApiError> {
    let tokenizer = &served.session.text().tokenizer;
    Ok(match request.parse_special {
        true => tokenizer.encode_raw(&request.prompt)?,
        false => tokenizer.encode_text(&request.prompt)?,
    })
}

/// Renders a chat request whose `model` may be missing.
fn applied(asked: &Asked, mut map: Map<String, Value>) -> Result<Applied, ApiError> {
    map.entry("model").or_insert_with(|| asked.app.id().into());
    map.insert("dry_run".into(), true.into());
    let prepared = prepare(asked, ChatRequest::read(map, &asked.served)?)?;
    Ok(Applied {
        prompt: prepared.facts.prompt_text.to_string(),
        prompt_token_ids: prepared.facts.prompt_ids.to_vec(),
        notes: notes_view(prepared.job.notes.iter()),
    })
}

fn pieces(served: &Served, ids: &[u32]) -> Vec<TokenPiece> {
    let tokenizer = &served.session.text().tokenizer;
    let piece = |&id: &u32| TokenPiece {
        id,
        piece: tokenizer.decode(&[id], Specials::Keep),
        bytes: tokenizer.token_bytes(id).unwrap_or_default().to_vec(),
    };
    ids.iter().map(piece).collect()
}

/// Text of ids.
#[utoipa::path(post, path = "/detokenize", tag = "Tokens", request_body = DetokenizeRequest,
    responses((status = 200, body = Detokenized)))]
pub(crate) async fn detokenize(Incoming(asked): Incoming) -> Result<Response, ApiError> {
    let text = |asked: &Asked| {
        let (mut fields, served) = (Fields::new(asked.object()?), &asked.served);
        let tokens = fields.need("tokens")?;
        let tokens = tokens.as_array().ok_or_else(|| unexpected("tokens", "an array of ids", &tokens))?;
        let request = DetokenizeRequest { tokens: id_list(tokens, "tokens", served.vocabulary())? };
        let text = served.session.text().tokenizer.decode(&request.tokens, Specials::Keep);
        Ok(json(&Detokenized { prompt: text.clone(), content: text }))
    };
    asked.prepare(text).await
}

/// Facts of the tokenizer.
#[utoipa::path(get, path = "/tokenizer_info", tag = "Tokens",
    responses((status = 200, body = TokenizerInfo)))]
pub(crate) async fn info(State(app): State<App>) -> Result<Response, ApiError> {
    let served = app.loaded()?;
    let text = served.session.text();
    Ok(json(&TokenizerInfo {
        tokenizer_class: served.info.tokenizer_class.clone(),
        bos_token: None,
        eos_token: served.info.eos_token.clone(),
        pad_token: served.info.pad_token.clone(),
        vocab_size: served.vocabulary(),
        chat_template: text.template.source().to_owned(),
    }))
}

/// The prompt of a chat.
#[utoipa::path(post, path = "/apply-template", tag = "Tokens", request_body = ChatRequest,
    responses((status = 200, body = Applied)))]
pub(crate) async fn apply_template(Incoming(asked): Incoming) -> Result<Response, ApiError> {
    asked.prepare(|asked| Ok(json(&applied(asked, asked.object()?)?))).await
}
