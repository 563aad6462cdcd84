//! RabbitMQ over `lapin`.
