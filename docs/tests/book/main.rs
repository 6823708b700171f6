//! What the book and the other documents say, held against the programs and the repository.

#![allow(missing_docs, reason = "tests")]

mod boot;
mod commands;
mod examples;
mod links;
mod reference;
mod security;

/// Fails with everything that is wrong, a line each.
fn all_right(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
