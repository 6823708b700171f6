//! Reading a configuration: [`Config::parse`].

use super::error::ConfigError;
use super::model::Config;
use super::{check, raw, yaml};

impl Config {
    /// Reads and checks a configuration. `file` only names it in errors.
    ///
    /// # Errors
    /// The first mistake, with its place.
    pub fn parse(text: &str, file: &str) -> Result<Self, ConfigError> {
        let root: raw::Root = yaml::read(text, file)?;
        check::check(root).map_err(|e| e.in_file(file))
    }
}
