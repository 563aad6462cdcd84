//! The names of the store's tables.
//!
//! Names go into the text of statements, where nothing can be bound. Therefore a name is checked to be a
//! plain identifier before it is used at all, and what is checked cannot be anything else afterwards.

use super::StoreError;

/// The longest schema or prefix. PostgreSQL cuts identifiers off at 63 bytes without an error, and the
/// store's own part of a name needs up to 24 of them.
const LONGEST: usize = 32;

/// Where the tables are: a schema (PostgreSQL) and a prefix of their names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Names {
    schema: Option<String>,
    prefix: String,
}

impl Names {
    /// Names in a schema, or in none.
    pub(crate) fn new(schema: Option<&str>, prefix: &str) -> Result<Self, StoreError> {
        if let Some(schema) = schema {
            check("schema", schema)?;
        }
        if !prefix.is_empty() {
            check("table prefix", prefix)?;
        }
        Ok(Self {
            schema: schema.map(str::to_owned),
            prefix: prefix.to_owned(),
        })
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// Puts names into a statement: `{t}` before a table or sequence, `{i}` before a new index, whose schema
    /// is that of its table.
    pub(crate) fn fill(&self, text: &str) -> String {
        let table = match &self.schema {
            Some(schema) => format!("{schema}.{}", self.prefix),
            None => self.prefix.clone(),
        };
        text.replace("{t}", &table).replace("{i}", &self.prefix)
    }
}

/// Lower case only: an unquoted identifier is folded to it by PostgreSQL, and two stores whose names
/// differ in case alone would be one.
fn check(what: &str, name: &str) -> Result<(), StoreError> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let starts = |c: char| c.is_ascii_lowercase() || c == '_';
    if name.len() <= LONGEST && name.starts_with(starts) && name.chars().all(plain) {
        return Ok(());
    }
    Err(StoreError::refused(format!(
        "the {what} is not a plain identifier: 1 to {LONGEST} of a-z, 0-9 and _, not starting with a digit"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_identifiers_are_names() {
        for (name, right) in [
            ("laneway", true),
            ("_l2", true),
            ("", false),
            ("2l", false),
            ("Laneway", false),
            ("a b", false),
            ("a;drop table b", false),
            ("a\"", false),
            ("ä", false),
            ("a23456789012345678901234567890123", false),
        ] {
            assert_eq!(Names::new(Some(name), "").is_ok(), right, "{name}");
        }
    }

    #[test]
    fn a_statement_gets_schema_and_prefix() {
        let names = Names::new(Some("app"), "lw_").expect("plain");
        assert_eq!(names.fill("{t}messages {i}due"), "app.lw_messages lw_due");
    }
}
