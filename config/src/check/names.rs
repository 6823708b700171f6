//! Object name checks.

use crate::mistake::Mistake;
use crate::yaml::At;

pub(super) fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 64
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':'))
}

pub(super) fn name_mistake(at: At, path: &str, name: &str) -> Mistake {
    Mistake::new(at, path, format!("invalid name `{name}`"))
        .hint("use 1 to 64 letters, digits, `-`, `_`, `.` or `:`")
}
