//! Errors of requests, and the one place that gives them a status and a shape (`docs/api.md` 2.3).

use axum::body::Body;
use axum::http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use engine::{Refusal, ReplyError};
use serde_json::{Value, json};
use text::{Fault, RequestError, TextError};

use crate::{LinkError, PictureFault, PictureProblem, ServeError};

/// Most characters of a client's own text in a message.
pub const QUOTE_CHARS_MAX: usize = 80;

/// How a route's clients expect errors to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `{"error": {"message", "type", "param", "code"}}`.
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}, "request_id"}`.
    Anthropic,
    /// `{"error": "text"}`.
    Ollama,
}

impl Dialect {
    /// The dialect of a path.
    pub fn of(path: &str) -> Self {
        match path {
            _ if path == "/v1/messages" || path.starts_with("/v1/messages/") => Self::Anthropic,
            _ if path.starts_with("/api/") => Self::Ollama,
            _ => Self::OpenAi,
        }
    }
}

/// What went wrong, as a word that clients may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The body is not JSON, nested too deeply, or names a key twice.
    InvalidJson,
    /// A field has a bad value.
    InvalidValue,
    /// A needed field is not there.
    MissingField,
    /// A field asks for something that is not done.
    UnsupportedParameter,
    /// A schema asks for something that is not done.
    UnsupportedSchema,
    /// Bytes that are no picture, or a broken one.
    InvalidImage,
    /// A picture beyond the limits.
    ImageTooLarge,
    /// A constraint takes too long or too much memory to prepare.
    ConstraintTooComplex,
    /// The chat template refuses the chat.
    TemplateError,
    /// The prompt does not fit the context.
    ContextLengthExceeded,
    /// No key, or a wrong one.
    InvalidApiKey,
    /// No model of that name.
    ModelNotFound,
    /// No such route.
    NotFound,
    /// The route has no such method.
    MethodNotAllowed,
    /// The request came too slowly.
    Timeout,
    /// The body is too long.
    BodyTooLarge,
    /// The body is not declared as plain JSON.
    UnsupportedMediaType,
    /// The `Host` header names another host.
    WrongHost,
    /// The headers are too long.
    HeadersTooLarge,
    /// The waiting queue is full.
    QueueFull,
    /// The key has as many requests as it may have.
    KeyLimit,
    /// A fault of this program.
    Internal,
    /// A logit was not finite.
    NumericalFault,
    /// The device failed.
    DeviceFault,
    /// The route exists in other servers and not here.
    NotImplemented,
    /// The model is being loaded.
    Loading,
    /// The server is about to end.
    Draining,
    /// No slot in time.
    QueueTimeout,
    /// The model makes no progress.
    Stalled,
}

impl Code {
    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidJson => "invalid_json",
            Self::InvalidValue => "invalid_value",
            Self::MissingField => "missing_field",
            Self::UnsupportedParameter => "unsupported_parameter",
            Self::UnsupportedSchema => "unsupported_schema",
            Self::InvalidImage => "invalid_image",
            Self::ImageTooLarge => "image_too_large",
            Self::ConstraintTooComplex => "constraint_too_complex",
            Self::TemplateError => "template_error",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::InvalidApiKey => "invalid_api_key",
            Self::ModelNotFound => "model_not_found",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::Timeout => "timeout",
            Self::BodyTooLarge => "body_too_large",
            Self::UnsupportedMediaType => "unsupported_media_type",
            Self::WrongHost => "wrong_host",
            Self::HeadersTooLarge => "headers_too_large",
            Self::QueueFull => "queue_full",
            Self::KeyLimit => "key_limit",
            Self::Internal => "internal",
            Self::NumericalFault => "numerical_fault",
            Self::DeviceFault => "device_fault",
            Self::NotImplemented => "not_implemented",
            Self::Loading => "loading",
            Self::Draining => "draining",
            Self::QueueTimeout => "queue_timeout",
            Self::Stalled => "stalled",
        }
    }

    /// The status.
    pub fn status(self) -> StatusCode {
        match self {
            Self::InvalidApiKey => StatusCode::UNAUTHORIZED,
            Self::ModelNotFound | Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::Timeout => StatusCode::REQUEST_TIMEOUT,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::WrongHost => StatusCode::MISDIRECTED_REQUEST,
            Self::HeadersTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::QueueFull | Self::KeyLimit => StatusCode::TOO_MANY_REQUESTS,
            Self::Internal | Self::NumericalFault | Self::DeviceFault => StatusCode::INTERNAL_SERVER_ERROR,
            Self::NotImplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Loading | Self::Draining | Self::QueueTimeout | Self::Stalled => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            _ => StatusCode::BAD_REQUEST,
        }
    }

    /// The type in a dialect's words.
    pub fn kind(self, dialect: Dialect) -> &'static str {
        let anthropic = dialect == Dialect::Anthropic;
        match self.status().as_u16() {
            401 => "authentication_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            500 if anthropic => "api_error",
            503 if anthropic => "overloaded_error",
            500 | 503 => "server_error",
            _ => "invalid_request_error",
        }
    }
}

/// An error on its way to the client.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{}: {message}", code.name())]
pub struct ApiError {
    /// What kind.
    pub code: Code,
    /// For people; see [`QUOTE_CHARS_MAX`].
    pub message: String,
    /// Path into the request.
    pub param: Option<String>,
    /// Tokens of the prompt and of the context, where the one does not fit the other.
    pub overflow: Option<(usize, usize)>,
    /// Seconds after which it may be worth to try again.
    pub retry_after: Option<u32>,
}

impl ApiError {
    /// An error without a place in the request.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), param: None, overflow: None, retry_after: None }
    }

    /// An error at a path of the request. The path opens the message.
    pub fn at(code: Code, param: impl Into<String>, detail: impl AsRef<str>) -> Self {
        let param = param.into();
        let message = format!("{param}: {}", detail.as_ref());
        Self { param: Some(param), ..Self::new(code, message) }
    }

    /// A bad value.
    pub fn invalid(param: impl Into<String>, detail: impl AsRef<str>) -> Self {
        Self::at(Code::InvalidValue, param, detail)
    }

    /// Something that is not done.
    pub fn unsupported(param: impl Into<String>, detail: impl AsRef<str>) -> Self {
        Self::at(Code::UnsupportedParameter, param, detail)
    }

    /// A prompt that does not fit, in the words that clients look for to shorten a chat by themselves.
    pub fn overflow(tokens: usize, context: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {context} tokens, but the prompt is too long: {tokens} \
             tokens > {context} maximum. The request ({tokens} tokens) exceeds the available context size \
             ({context} tokens). Reduce the length of the messages."
        );
        let overflow = Some((tokens, context));
        Self { overflow, ..Self::new(Code::ContextLengthExceeded, message) }
    }

    fn retry(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// The JSON of a dialect.
    pub fn body(&self, dialect: Dialect, request_id: &str) -> Value {
        let kind = self.code.kind(dialect);
        match dialect {
            Dialect::OpenAi => {
                let mut error = json!({"message": self.message, "type": kind, "param": self.param,
                    "code": self.code.name()});
                if let Some((tokens, context)) = self.overflow {
                    error["n_prompt_tokens"] = tokens.into();
                    error["n_ctx"] = context.into();
                }
                json!({"error": error})
            }
            Dialect::Anthropic => json!({"type": "error", "request_id": request_id,
                "error": {"type": kind, "message": self.message}}),
            Dialect::Ollama => json!({"error": self.message}),
        }
    }

    /// The whole response in a dialect.
    pub fn response(&self, dialect: Dialect, request_id: &str) -> Response {
        let body = self.body(dialect, request_id).to_string();
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = self.code.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if self.code == Code::InvalidApiKey {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = self.retry_after {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        response
    }
}

/// Leaves the error beside an empty response; the outermost layer, which knows the path, writes it out.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.code.status().into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// Writes out the error that a handler left, with the headers that were set beside it.
pub(crate) fn written(mut response: Response, dialect: Dialect, request_id: &str) -> Response {
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let mut written = error.response(dialect, request_id);
    if let Some(allow) = response.headers_mut().remove(ALLOW) {
        written.headers_mut().insert(ALLOW, allow);
    }
    written
}

/// Text from outside, cut to what a message may hold.
pub fn quoted(text: &str) -> String {
    let mut short: String = text.chars().take(QUOTE_CHARS_MAX).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let code = match error.fault {
            Fault::Missing => Code::MissingField,
            Fault::Invalid => Code::InvalidValue,
            Fault::Unsupported => Code::UnsupportedParameter,
        };
        Self::at(code, error.path, error.detail)
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        let template = |message: String| Self::new(Code::TemplateError, message);
        match error {
            TextError::Request(error) => error.into(),
            TextError::PromptTooLong { tokens, most } => Self::overflow(tokens, most),
            TextError::TemplateRaised { message } => {
                template(format!("the chat template refuses this chat: {}", quoted(&message)))
            }
            TextError::TemplateFailed { line, .. } => {
                template(format!("the chat template failed at its line {line} on this chat"))
            }
            error @ (TextError::TemplateLimit { .. }
            | TextError::TemplateImages { .. }
            | TextError::NoFreeMarks) => template(error.to_string()),
            TextError::NotContinuable { index, .. } => {
                let message = error.to_string();
                Self { param: Some(format!("messages[{index}]")), ..template(message) }
            }
            TextError::Encode { bytes, .. } => {
                Self::new(Code::Internal, format!("a text of {bytes} bytes could not be tokenized"))
            }
            // The rest is about files, which are read before the first request.
            _ => Self::new(Code::Internal, "the text side of the model failed"),
        }
    }
}

impl From<PictureFault> for ApiError {
    fn from(fault: PictureFault) -> Self {
        let PictureFault { path, problem } = fault;
        let code = match &problem {
            PictureProblem::NoVision => Code::UnsupportedParameter,
            PictureProblem::Link(error) => match error {
                LinkError::Bytes { .. } => Code::ImageTooLarge,
                LinkError::Failed { .. } => Code::InvalidImage,
                LinkError::Busy => {
                    return Self::at(Code::QueueFull, path, problem.to_string()).retry(5);
                }
                LinkError::Off
                | LinkError::Form { .. }
                | LinkError::Host { .. }
                | LinkError::Inside { .. } => Code::UnsupportedParameter,
            },
            PictureProblem::TooMany { .. } | PictureProblem::Detail { .. } => Code::InvalidValue,
            PictureProblem::Picture(error) if error.is_too_large() => Code::ImageTooLarge,
            PictureProblem::TooManyPixels { .. } => Code::ImageTooLarge,
            PictureProblem::Picture(_) | PictureProblem::Url { .. } | PictureProblem::Base64 { .. } => {
                Code::InvalidImage
            }
            PictureProblem::Busy(_) => {
                return Self::at(Code::QueueFull, path, problem.to_string()).retry(5);
            }
            PictureProblem::Fault => Code::Internal,
        };
        Self::at(code, path, problem.to_string())
    }
}

impl From<ServeError> for ApiError {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::Text(error) => error.into(),
            ServeError::Request(error) => error.into(),
            ServeError::Refused(refusal) => refusal.into(),
            ServeError::Picture(fault) => fault.into(),
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match &refusal {
            Refusal::PromptTooLong { tokens, context } => Self::overflow(*tokens, *context),
            Refusal::EmptyPrompt => Self::invalid("prompt", "0 tokens; at least 1 is needed"),
            Refusal::Token { field, index, token, vocabulary } => Self::invalid(
                format!("{}[{index}]", named(field)),
                format!("token {token} is not below the vocabulary of {vocabulary}"),
            ),
            Refusal::Value { field, value, allowed } => {
                Self::invalid(named(field), format!("{value} is out of range; allowed: {allowed}"))
            }
            Refusal::QueueFull { .. } => Self::new(Code::QueueFull, refusal.to_string()).retry(5),
            Refusal::DoesNotFit { .. } => Self::invalid("max_tokens", refusal.to_string()),
            Refusal::Stopped { .. } => {
                Self::new(Code::Internal, "the engine has stopped; restart the server")
            }
        }
    }
}

/// The API's name of an engine field.
fn named(field: &str) -> &str {
    match field {
        "choices" => "n",
        "logprobs" => "top_logprobs",
        "drafting.policy" | "drafting.first" => "speculative",
        field => field,
    }
}

impl From<ReplyError> for ApiError {
    fn from(error: ReplyError) -> Self {
        match &error {
            ReplyError::NumericalFault { .. } => Self::new(Code::NumericalFault, error.to_string()),
            ReplyError::DeviceFault { .. } => {
                Self::new(Code::DeviceFault, "the device failed while it computed this reply")
            }
            ReplyError::QueueTimeout { waited } => Self::new(
                Code::QueueTimeout,
                format!("no slot became free in {} s; try again later", waited.as_secs()),
            )
            .retry(30),
            ReplyError::ConstraintDeadEnd { .. } => Self::new(Code::Internal, error.to_string()),
            ReplyError::Stopped { .. } => Self::new(Code::Internal, "the engine stopped during this reply"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_shapes() {
        let error = ApiError::overflow(40210, 32768);
        let openai = error.body(Dialect::OpenAi, "r");
        assert_eq!(openai["error"]["code"], "context_length_exceeded");
        assert_eq!((&openai["error"]["n_ctx"], &openai["error"]["param"]), (&32768.into(), &Value::Null));
        assert_eq!(
            openai["error"]["message"],
            "This model's maximum context length is 32768 tokens, but the prompt is too long: 40210 tokens > \
             32768 maximum. The request (40210 tokens) exceeds the available context size (32768 tokens). \
             Reduce the length of the messages."
        );
        let anthropic =
            ApiError::from(ReplyError::NumericalFault { position: 3 }).body(Dialect::Anthropic, "r");
        assert_eq!(
            (&anthropic["error"]["type"], &anthropic["request_id"]),
            (&"api_error".into(), &"r".into())
        );
        assert_eq!(error.body(Dialect::Ollama, "r"), json!({"error": error.message}));
    }

    #[test]
    fn client_text_is_cut() {
        assert_eq!(quoted(&"é".repeat(100)).chars().count(), QUOTE_CHARS_MAX + 1);
        assert_eq!(quoted("short"), "short");
        let raised = ApiError::from(TextError::TemplateRaised { message: "x".repeat(500) });
        assert!(raised.message.len() < 140 && raised.code == Code::TemplateError);
    }
}
