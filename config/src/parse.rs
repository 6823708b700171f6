//! Configuration parser: [`Config::parse`].

use super::error::ConfigError;
use super::model::Config;
use super::{check, raw, yaml};

impl Config {
    /// Parses and checks a configuration. `file` is only used in errors.
    ///
    /// # Errors
    /// Returns the first error with its position.
    pub fn parse(text: &str, file: &str) -> Result<Self, ConfigError> {
        let root: raw::Root = yaml::read(text, file)?;
        check::check(root).map_err(|e| e.in_file(file))
    }
}
