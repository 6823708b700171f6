//! Commands to show and change configuration objects of a running daemon by path.
//!
//! A change is applied to the configuration that we have read, and then the daemon replaces its
//! configuration atomically. If it was changed by another user in the meantime, we apply the change
//! to the new configuration, unless it uses a list index, which may refer to a different object by
//! then.

use std::io::Write;
use std::path::Path;

use clap::Subcommand;
use hyper::Method;
use riser_admin_api::client::{self, ApiRequest, ClientError};
use riser_admin_api::view::Changes;
use serde_json::Value;

use super::request::{ClientOptions, Output, show};
use super::{Failure, print};
use crate::config::{Config, Document, EditError, ObjectPath, masked, to_yaml};
use crate::control::objects::{self, Facts};
use crate::control::report;

/// Maximum number of attempts to apply a change.
const ATTEMPTS: usize = 16;

const PATHS: &str = "\
Paths are those of the configuration file: /backends/disk0, /targets/demo/luns/0, \
/targets/demo/portals/iscsi:192.0.2.10:3260, /targets/demo/chap/users/host, /limits. List items are \
identified by name, or by index starting at 0. In names, write ~1 for a slash and ~0 for a tilde.";

const KEYS: &str = "\
A key can be a key of the object, such as size=1GiB, or a path to a key below it, such as \
portals/0/listen=192.0.2.10. Separate multiple values with commas. A secret on the command line is \
visible to all users who can list processes; use a file instead (secret_file).";

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Show objects as a tree, with configuration and state.
    #[command(after_help = PATHS)]
    Ls {
        /// Path of the root of the tree.
        #[arg(default_value = "/")]
        path: ObjectPath,
        /// Show at most this number of levels [default: all].
        #[arg(long, short, value_name = "N")]
        depth: Option<usize>,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Show the configured value of an object or a key.
    #[command(after_help = PATHS)]
    Get {
        /// Path of the object or key.
        path: ObjectPath,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Show an object in full: values, unset keys and state.
    #[command(after_help = PATHS)]
    Info {
        /// Path of the object.
        #[arg(default_value = "/")]
        path: ObjectPath,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Set keys of an object.
    #[command(after_help = KEYS)]
    Set {
        /// Path of the object.
        path: ObjectPath,
        /// Keys with their values.
        #[arg(required = true, value_name = "KEY=VALUE", value_parser = pair)]
        keys: Vec<(String, String)>,
        #[command(flatten)]
        change: Change,
    },
    /// Create an object: a backend, target, portal, logical unit or rule.
    #[command(after_help = KEYS)]
    Create {
        /// Path of the object; to append to a list, its path, such as /targets/demo/access.
        path: ObjectPath,
        /// Keys with their values.
        #[arg(value_name = "KEY=VALUE", value_parser = pair)]
        keys: Vec<(String, String)>,
        #[command(flatten)]
        change: Change,
    },
    /// List objects with this path prefix, for shell completion.
    #[command(hide = true)]
    Complete {
        /// Prefix of a path.
        text: String,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Delete an object, or reset a key to its default.
    #[command(after_help = PATHS)]
    Delete {
        /// Path of the object or key.
        path: ObjectPath,
        #[command(flatten)]
        change: Change,
    },
}

/// A change to a running daemon.
#[derive(Debug, clap::Args)]
pub(super) struct Change {
    /// Show the differences without applying the change.
    #[arg(long)]
    dry_run: bool,
    /// Apply the configuration even if backends, portals or the metrics address are not available
    ///
    /// These are retried, and shown as NOT SERVED by `riserd status`.
    #[arg(long)]
    allow_unavailable: bool,
    #[command(flatten)]
    options: ClientOptions,
}

/// Returns a request to apply a configuration.
pub(super) fn put_config(how: &str, allow_unavailable: bool) -> ApiRequest {
    let target = format!("/v1/config?how={how}&allow_unavailable={allow_unavailable}");
    ApiRequest::new(Method::PUT, target)
}

/// Executes a command.
pub(super) fn run(out: &mut dyn Write, verb: Verb) -> Result<(), Failure> {
    match verb {
        Verb::Ls {
            path,
            depth,
            options,
        } => {
            let facts = facts(&options)?;
            let document = Document::new(&facts.config);
            let (place, found) = document.find(&path)?;
            // `get` only needs the configuration, which is a single request. The tree and `info`
            // also show the state of objects, so `facts` sends three more.
            let depth = depth.unwrap_or(usize::MAX);
            let node = objects::list(&facts, &place, found, depth);
            show(out, options.output, &node, objects::tree_text)
        }
        Verb::Get { path, options } => {
            let document = Document::new(&configuration(&options)?.0);
            let found = document.at(&path)?;
            let Some(value) = found.value else {
                return unset(out, &options, &path, found.shape.is_structured());
            };
            let last = path.segments().last().map_or("", String::as_str);
            show(out, options.output, &masked(value, last), text_of)
        }
        Verb::Info { path, options } => {
            let facts = facts(&options)?;
            let document = Document::new(&facts.config);
            let (place, found) = document.find(&path)?;
            let info = objects::info(&facts, &place, found);
            show(out, options.output, &info, objects::info_text)
        }
        Verb::Complete { text, options } => {
            let document = Document::new(&configuration(&options)?.0);
            let paths = completions(&document, &text);
            paths.iter().try_for_each(|path| print(out, path))
        }
        Verb::Set { path, keys, change } => change.apply(out, "set", |d| d.set(&path, &keys)),
        Verb::Create { path, keys, change } => {
            change.apply(out, "create", |d| d.create(&path, &keys))
        }
        Verb::Delete { path, change } => change.apply(out, "delete", |d| d.delete(&path)),
    }
}

/// Returns the paths of objects that start with `text`, one level below its last complete segment.
/// If there are more objects below a path, it ends with a slash.
fn completions(document: &Document, text: &str) -> Vec<String> {
    let parent = text.rsplit_once('/').map_or("", |(parent, _)| parent);
    let Ok(parent) = parent.parse() else {
        return Vec::new();
    };
    let Ok((place, found)) = document.find(&parent) else {
        return Vec::new();
    };
    let children = found.children().into_iter();
    let paths = children.map(|(name, child)| {
        let end = if child.children().is_empty() { "" } else { "/" };
        format!("{}{end}", place.join(&name))
    });
    paths.filter(|path| path.starts_with(text)).collect()
}

/// Parses `KEY=VALUE`. For `KEY=`, the value is empty.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".to_owned()),
    }
}

/// Prints the result of `get` for an unset key.
fn unset(
    out: &mut dyn Write,
    options: &ClientOptions,
    path: &ObjectPath,
    is_object: bool,
) -> Result<(), Failure> {
    match options.output {
        Output::Json => print(out, &Value::Null.to_string()),
        Output::Text if is_object => print(out, "{}"),
        Output::Text => Err(Failure::run_time(format!("{path}: not set"))),
    }
}

/// Formats a value for users.
fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => to_yaml(other).trim_end().to_owned(),
    }
}

/// Returns the configuration of the daemon, and its revision.
fn configuration(options: &ClientOptions) -> Result<(Config, Option<String>), Failure> {
    let said = client::fetch(
        &options.socket()?,
        ApiRequest::new(Method::GET, "/v1/config"),
    )?;
    let yaml = String::from_utf8_lossy(&said.body);
    // This can only fail if the daemon has a different version.
    let config = Config::parse(&yaml, "the daemon's configuration").map_err(Failure::run_time)?;
    Ok((config, said.revision))
}

/// Requests the configuration and state of the daemon.
fn facts(options: &ClientOptions) -> Result<Facts, Failure> {
    let socket = options.socket()?;
    let get = |path| ApiRequest::new(Method::GET, path);
    Ok(Facts {
        config: configuration(options)?.0,
        status: client::call(&socket, get("/v1/status"))?,
        targets: client::call(&socket, get("/v1/targets"))?,
        live: client::call(&socket, get("/v1/live"))?,
    })
}

impl Change {
    /// Applies a change for command `how`, and shows the differences.
    fn apply(
        &self,
        out: &mut dyn Write,
        how: &str,
        edit: impl Fn(&mut Document) -> Result<(), EditError>,
    ) -> Result<(), Failure> {
        let socket = self.options.socket()?;
        for _ in 0..ATTEMPTS {
            let (config, revision) = configuration(&self.options)?;
            let mut document = Document::new(&config);
            edit(&mut document)?;
            let by_number = document.is_by_number();
            let (_, yaml) = document.finish()?;
            match self.send(&socket, how, yaml, revision) {
                // With names, the change refers to the same objects in the new configuration, so we
                // try again. A list index may refer to a different object.
                Err(ClientError::Outdated(_)) if !by_number => {}
                Err(ClientError::Outdated(why)) => {
                    let text = format!("{why}; an index may refer to a different object now");
                    return Err(Failure::run_time(text));
                }
                Err(other) => return Err(other.into()),
                Ok(changes) => {
                    show(out, self.options.output, &changes, report::changes)?;
                    return match changes.refused {
                        Some(why) => Err(Failure::run_time(why)),
                        None => Ok(()),
                    };
                }
            }
        }
        Err(Failure::run_time(
            "the configuration is being changed by other clients; try again",
        ))
    }

    /// Requests to apply a configuration, or to show the differences.
    fn send(
        &self,
        socket: &Path,
        how: &str,
        yaml: String,
        revision: Option<String>,
    ) -> Result<Changes, ClientError> {
        let question = if self.dry_run {
            ApiRequest::new(Method::POST, "/v1/diff")
        } else {
            ApiRequest {
                replaces: revision,
                ..put_config(how, self.allow_unavailable)
            }
        };
        client::call(socket, question.with(yaml))
    }
}

impl From<EditError> for Failure {
    fn from(error: EditError) -> Self {
        Self::mistake(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_completed_level_by_level() {
        let config = Config::parse(
            "backends:\n  disk0: { kind: ram, size: 1MiB }\n  disk1: { kind: ram, size: 1MiB }\n\
             targets:\n- name: t\n  iqn: iqn.2026-01.a:t\n  \
             portals: [{ protocol: iscsi, listen: 192.0.2.10 }]\n  luns: { 0: disk0, 7: disk1 }\n",
            "test",
        );
        let document = Document::new(&config.unwrap());
        let complete = |text: &str| completions(&document, text);
        assert!(complete("/").contains(&"/targets/".to_owned()));
        assert_eq!(complete("/tar"), ["/targets/"]);
        let disks = complete("/backends/d");
        assert_eq!(disks.len(), 2, "{disks:?}");
        assert!(disks[0].starts_with("/backends/disk0"), "{disks:?}");
        let luns = complete("/targets/t/luns/7");
        assert_eq!(luns, ["/targets/t/luns/7"]);
        let portals = complete("/targets/t/portals/");
        assert_eq!(portals, ["/targets/t/portals/iscsi:192.0.2.10:3260"]);
        for text in ["", "/no/such/", "/~", "//"] {
            assert!(complete(text).iter().all(|path| path.starts_with(text)));
        }
    }
}
