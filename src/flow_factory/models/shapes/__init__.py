"""A model without numbers: its networks on torch's meta device, and what their tensors would take."""
