//! [`Mistake`]: an error in a check, with its position.

use super::error::ConfigError;
use super::yaml::At;

/// An error without a file name.
#[derive(Debug)]
pub(super) struct Mistake {
    at: At,
    path: String,
    message: String,
    hint: Option<String>,
}

impl Mistake {
    pub(super) fn new(at: At, path: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            at,
            path: path.into(),
            message: message.into(),
            hint: None,
        }
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(super) fn in_file(self, file: &str) -> ConfigError {
        ConfigError {
            file: file.to_owned(),
            line: self.at.line.max(1),
            column: self.at.column.max(1),
            path: self.path,
            message: self.message,
            hint: self.hint,
        }
    }
}

pub(super) type Checked<T> = Result<T, Mistake>;
