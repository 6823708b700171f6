//! Compares the book and the other documents with the programs and the repository.

#![allow(missing_docs, reason = "tests")]

mod boot;
mod commands;
mod examples;
mod layout;
mod links;
mod names;
mod reference;
mod security;

/// Fails with one line for each mistake.
fn all_right(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
